//! What goes well: bytes, events and completions, in no order.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fake_efa::disorder::{Choice, Disorder};
use libfabric_sys as sys;

use crate::rig::*;

const TARGET: u64 = sys::FI_REMOTE_CQ_DATA | sys::FI_RMA | sys::FI_REMOTE_WRITE;

/// Writes `count` blocks of `len` bytes from `a` to `b`, all at once as far as the queue goes. When the event of a block
/// is read, all of it must be there. Returns the order of the events, and how many came before an earlier write was there.
fn stream(
    pair: &Pair,
    count: usize,
    len: usize,
    with_data: impl Fn(usize) -> bool,
) -> (Vec<u64>, u32) {
    let (source, target) =
        (pair.node.memory((count * len).max(1), 0), pair.node.memory((count * len).max(1), 0));
    for block in 0..count {
        source.fill(block * len, &vec![block as u8 | 1; len]);
    }
    let mut contexts: Vec<_> = (0..count).map(|_| context()).collect();
    let (mut posted, mut done, mut order) = (0, 0, Vec::new());
    let mut early = 0;
    let expected = (0..count).filter(|&block| with_data(block)).count();
    let end = Instant::now() + PATIENCE;
    while done < count || order.len() < expected {
        assert!(
            Instant::now() < end,
            "{done} of {count} done, {} of {expected} events",
            order.len()
        );
        if posted < count {
            let offset = posted * len;
            let write = Write {
                memory: &source,
                offset,
                len,
                data: with_data(posted).then_some(posted as u64),
                to: pair.to_b,
                address: target.address() + offset as u64,
                key: target.key(),
            };
            match pair.a.try_post(&write, at(&mut contexts[posted])) {
                0 => posted += 1,
                error => assert_eq!(error, -(sys::FI_EAGAIN as isize)),
            }
        }
        if let Some(event) = pair.a.poll() {
            let Event::Done { context, flags, from, .. } = event else { panic!("{event:?}") };
            assert!(contexts.iter_mut().any(|mine| at(mine) as usize == context));
            assert_eq!((flags, from), (sys::FI_RMA | sys::FI_WRITE, sys::FI_ADDR_NOTAVAIL));
            done += 1;
        }
        if let Some(event) = pair.b.poll() {
            let Event::Done { context: 0, flags: TARGET, len: got, data, from } = event else {
                panic!("{event:?}")
            };
            assert_eq!((got, from), (len, pair.to_a));
            let block = data as usize;
            for byte in 0..len {
                assert_eq!(
                    target.byte(block * len + byte),
                    block as u8 | 1,
                    "byte {byte} of {block}"
                );
            }
            assert!(!order.contains(&data), "two events of {data}");
            let there = |block: usize| (0..len).all(|byte| target.byte(block * len + byte) != 0);
            early += u32::from(!(block.saturating_sub(8)..block).all(there));
            order.push(data);
        }
    }
    (order, early)
}

#[test]
fn every_write_arrives_once_in_any_order() {
    // Later than a busy machine's threads are.
    let environment = [("FAKE_EFA_DELAY_US", "10000")];
    alone("delivery::every_write_arrives_once_in_any_order", &environment, |fake| {
        let pair = Pair::new(fake);
        let (order, early) = stream(&pair, 300, 64, |_| true);
        let overtaken = order.windows(2).filter(|two| two[0] > two[1]).count();
        assert!(overtaken >= 30 && early >= 10, "{overtaken} overtaken, {early} early of 300");
        stream(&pair, 20, 0, |_| true);
        // Plain writes are overtaken by a later write with data: the last event is not the last landing.
        let (_, early) = stream(&pair, 192, 100_000, |block| block % 8 == 7);
        assert!(early >= 1, "{early} early of 24");
        stream(&pair, 3, 1 << 20, |_| true);
        pair.close();
        fake.broken(&[]);
        assert!(logged("endpoint", "events_overtaken") >= 30);
        assert!(logged("endpoint", "pieces_overtaken") >= 30);
        assert!(logged("endpoint", "held") >= 30);
        assert_eq!(logged("endpoint", "failed"), 0);
        assert_eq!(logged("start", "seed").to_string(), std::env::var("FAKE_EFA_SEED").unwrap());
    });
}

#[test]
fn a_completion_may_be_there_before_the_bytes() {
    let name = "delivery::a_completion_may_be_there_before_the_bytes";
    for early in ["0", "1"] {
        let environment = [("FAKE_EFA_EARLY_ACK", early), ("FAKE_EFA_DELAY_US", "10000")];
        alone(name, &environment, |fake| {
            if std::env::var("FAKE_EFA_EARLY_ACK").unwrap() != early {
                return;
            }
            let pair = Pair::new(fake);
            let (source, target) = (pair.node.memory(1, 1), pair.node.memory(100, 0));
            let mut mine = context();
            let missing = (0..100).filter(|&offset| {
                let (to, address, key) = (pair.to_b, target.address() + offset, target.key());
                let write =
                    Write { memory: &source, offset: 0, len: 1, data: None, to, address, key };
                assert_eq!(pair.a.post(&write, at(&mut mine)), 0);
                assert!(matches!(pair.a.next(), Event::Done { .. }));
                target.byte(offset as usize) == 0
            });
            let missing = missing.count();
            assert!(
                if early == "0" { missing == 0 } else { missing >= 3 },
                "{early}: {missing} of 100"
            );
            // They land all the same: at the latest when the registration is closed.
            let mut target = target;
            target.close();
            assert!((0..100).all(|at| target.byte(at) == 1));
            drop((source, target));
            pair.close();
            fake.broken(&[]);
        });
    }
}

#[test]
fn the_order_follows_from_the_seed() {
    // Apart by more than a thread is kept from running, as the model's own numbers say: one order each. What follows upon a packet is timed from when its
    // thread has taken that.
    let longest = Duration::from_secs(10);
    let apart = |seed| {
        let (initiator, target) =
            (Disorder::new(seed, 0, longest), Disorder::new(seed, 1, longest));
        let held = |op| target.once_in(4, Choice::Hold, op);
        let start =
            |op| initiator.delay(Choice::Start, op, 0) + initiator.delay(Choice::Piece, op, 0) / 4;
        let mut order: Vec<_> = (0..6).filter(|&op| !held(op)).collect();
        let due = |op: &u64| start(*op) + target.delay(Choice::Event, *op, 0);
        let done = |op: &u64| start(*op) + target.delay(Choice::Reply, *op, 0);
        order.sort_by_key(due);
        let gap = order.windows(2).map(|two| due(&two[1]) - due(&two[0])).min()?;
        let is_over = |op: &u64| due(op).max(done(op)) < PATIENCE - Duration::from_secs(3);
        let is_apart = order.len() == 6 && gap > Duration::from_secs(2);
        (is_apart && order.iter().all(is_over)).then_some(order)
    };
    let mut seeds = (0..).filter_map(|seed| apart(seed).map(|order| (seed, order)));
    let first = seeds.next().unwrap();
    let second = seeds.find(|(_, order)| *order != first.1).unwrap();
    // Both at once: it is waiting.
    std::thread::scope(|scope| {
        for (seed, order) in [&first, &second] {
            scope.spawn(move || {
                let text = seed.to_string();
                let environment =
                    [("FAKE_EFA_SEED", text.as_str()), ("FAKE_EFA_DELAY_US", "10000000")];
                alone("delivery::the_order_follows_from_the_seed", &environment, |fake| {
                    let real: u64 = std::env::var("FAKE_EFA_SEED").unwrap().parse().unwrap();
                    if real == *seed {
                        let pair = Pair::new(fake);
                        assert_eq!(stream(&pair, 6, 8, |_| true).0, *order);
                    }
                });
            });
        }
    });
}

#[test]
fn bytes_land_while_the_target_does_nothing() {
    alone("delivery::bytes_land_while_the_target_does_nothing", &[], |fake| {
        if role().is_some() {
            let node = Node::open(fake, fake.info());
            let (side, memory) = (node.side(64), node.memory(4096, 0));
            side.insert(unhex(&hear()));
            say(&format!("{} {} {}", hex(&side.address()), memory.address(), memory.key()));
            // Not one call since: all of it is there, sooner or later.
            while hear() == "look" {
                say(&(0..4096).filter(|&at| memory.byte(at) == 9).count().to_string());
            }
            let Event::Done { data: 5, from: 0, len: 4096, .. } = side.next() else {
                panic!("no event")
            };
            drop(memory);
            side.close();
            return node.close();
        }
        let mut other = peer("target", &[]);
        let node = Node::open(fake, fake.info());
        let (side, memory) = (node.side(64), node.memory(4096, 9));
        other.tell(&hex(&side.address()));
        let answer = other.hear();
        let words: Vec<_> = answer.split(' ').collect();
        let to = side.insert(unhex(words[0]));
        let (address, key) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        let write =
            Write { memory: &memory, offset: 0, len: 4096, data: Some(5), to, address, key };
        let mut mine = context();
        assert_eq!(side.post(&write, at(&mut mine)), 0);
        assert!(matches!(side.next(), Event::Done { .. }));
        // An acknowledged write lands soon, not at once.
        let start = Instant::now();
        loop {
            other.tell("look");
            let landed = other.hear();
            if landed == "4096" {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{landed} bytes");
            std::thread::sleep(Duration::from_millis(1));
        }
        other.tell("all of it is there");
        other.end();
        drop(memory);
        side.close();
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn two_processes_stream_to_each_other() {
    alone("delivery::two_processes_stream_to_each_other", &[], |fake| {
        const COUNT: u64 = 500;
        let node = Node::open(fake, fake.info());
        let (side, source, target) =
            (node.side(1024), node.memory(64, 3), node.memory(64 * COUNT as usize, 0));
        let mine = format!("{} {} {}", hex(&side.address()), target.address(), target.key());
        let mut other = role().is_none().then(|| peer("other", &[]));
        let theirs = match &mut other {
            Some(other) => {
                other.tell(&mine);
                other.hear()
            }
            None => {
                say(&mine);
                hear()
            }
        };
        let words: Vec<_> = theirs.split(' ').collect();
        let to = side.insert(unhex(words[0]));
        let (address, key): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        // The other has inserted this one by the time it answers.
        match &mut other {
            Some(other) => {
                other.tell("go");
                assert_eq!(other.hear(), "go");
            }
            None => {
                assert_eq!(hear(), "go");
                say("go");
            }
        }
        let mut contexts: Vec<_> = (0..COUNT).map(|_| context()).collect();
        let (mut posted, mut done, mut events) = (0, 0, HashMap::new());
        let end = Instant::now() + PATIENCE;
        while done < COUNT || events.len() < COUNT as usize {
            assert!(Instant::now() < end, "{done} done, {} events", events.len());
            if posted < COUNT {
                let (data, address) = (Some(posted), address + 64 * posted);
                let write = Write { memory: &source, offset: 0, len: 64, data, to, address, key };
                posted += u64::from(side.try_post(&write, at(&mut contexts[posted as usize])) == 0);
            }
            match side.poll() {
                Some(Event::Done { flags: TARGET, data, .. }) => {
                    assert_eq!(target.byte(64 * data as usize), 3);
                    assert_eq!(events.insert(data, ()), None);
                }
                Some(Event::Done { .. }) => done += 1,
                Some(other) => panic!("{other:?}"),
                None => {}
            }
        }
        // Neither leaves before the other has all its answers.
        match other {
            Some(mut other) => {
                other.tell("done");
                assert_eq!(other.hear(), "done");
                other.end();
            }
            None => {
                say("done");
                assert_eq!(hear(), "done");
            }
        }
        drop((source, target));
        side.close();
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn messages_wait_for_receives() {
    alone("delivery::messages_wait_for_receives", &[], |fake| {
        let pair = Pair::new(fake);
        let (source, target) = (pair.node.memory(9000, 4), pair.node.memory(9000, 0));
        let (mut sending, mut receiving) = (context(), context());
        let sending = at(&mut sending);
        let send = |len| loop {
            // SAFETY: memory and context stay until the completion.
            let result = unsafe {
                sys::fi_send(pair.a.ep, source.pointer(), len, source.desc(), pair.to_b, sending)
            };
            if result != -(sys::FI_EAGAIN as isize) {
                return result;
            }
        };
        assert_eq!(send(8193), -(sys::FI_EMSGSIZE as isize));
        fake.broken(&["message too long"]);
        assert_eq!(send(8192), 0);
        // Longer than any retransmission: it is not an error that nobody is ready.
        pair.a.quiet(Duration::from_millis(500));
        let recv = |len, context| {
            // SAFETY: memory and context stay until the completion.
            fine(unsafe {
                sys::fi_recv(
                    pair.b.ep,
                    target.pointer(),
                    len,
                    target.desc(),
                    sys::FI_ADDR_UNSPEC,
                    context,
                )
            } as i32);
        };
        recv(9000, at(&mut receiving));
        let Event::Done { context, flags, len: 8192, from, .. } = pair.b.next() else {
            panic!("no message")
        };
        assert_eq!((context, flags), (at(&mut receiving) as usize, sys::FI_MSG | sys::FI_RECV));
        assert_eq!((from, target.byte(8191), target.byte(8192)), (pair.to_a, 4, 0));
        assert!(
            matches!(pair.a.next(), Event::Done { flags, .. } if flags == sys::FI_MSG | sys::FI_SEND)
        );
        // One that does not fit fails at both ends.
        recv(10, at(&mut receiving));
        assert_eq!(send(11), 0);
        assert_eq!(pair.a.failure(), (sys::FI_EMSGSIZE, 11));
        assert_eq!(pair.b.failure(), (sys::FI_EMSGSIZE, 6));
        drop((source, target));
        pair.close();
        fake.broken(&["message too long"]);
    });
}

#[test]
fn with_the_mode_a_write_takes_a_receive() {
    alone("delivery::with_the_mode_a_write_takes_a_receive", &[], |fake| {
        let hints = fake.hints(|hints| hints.mode |= sys::FI_RX_CQ_DATA);
        let node = Node::open(fake, fake.getinfo(API, Some(&hints)).unwrap());
        let pair = Pair::of(node);
        let memory = pair.node.memory(64, 1);
        let (mut writing, mut receiving) = (context(), context());
        let write = Write {
            memory: &memory,
            offset: 0,
            len: 8,
            data: Some(7),
            to: pair.to_b,
            address: memory.address() + 32,
            key: memory.key(),
        };
        assert_eq!(pair.a.post(&write, at(&mut writing)), 0);
        pair.b.quiet(Duration::from_millis(100));
        pair.a.quiet(Duration::from_millis(1));
        // SAFETY: the context stays; there are no bytes.
        fine(unsafe {
            sys::fi_recv(
                pair.b.ep,
                std::ptr::null_mut(),
                0,
                std::ptr::null_mut(),
                u64::MAX,
                at(&mut receiving),
            )
        } as i32);
        let Event::Done { context, data: 7, flags: TARGET, .. } = pair.b.next() else {
            panic!("no event")
        };
        assert_eq!(context, at(&mut receiving) as usize);
        assert!(matches!(pair.a.next(), Event::Done { .. }));

        // A side without the mode and one with it do not understand each other.
        let usual = Node::open(fake, fake.info());
        let (other, bytes) = (usual.side(16), usual.memory(64, 2));
        let to = other.insert(pair.b.address());
        pair.b.insert(other.address());
        let write = Write { memory: &bytes, to, ..write };
        assert_eq!(other.post(&write, at(&mut writing)), 0);
        assert_eq!(other.failure(), (sys::FI_EOTHER, 18));
        drop((memory, bytes));
        other.close();
        usual.close();
        pair.close();
        fake.broken(&[]);
    });
}

#[test]
fn a_sleeper_is_woken_if_it_armed() {
    alone("delivery::a_sleeper_is_woken_if_it_armed", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (a, b) = (node.side(64), node.side_with(node.cq(64, sys::FI_WAIT_FD)));
        let (to, memory) = (a.insert(b.address()), node.memory(64, 1));
        b.insert(a.address());
        let mut fd = -1;
        // SAFETY: the queue is open, with a wait object; `fd` is what the command writes to.
        unsafe {
            fine(sys::fi_control(&raw mut (*b.cq).fid, sys::FI_GETWAIT, (&raw mut fd).cast()));
            let none = sys::fi_control(&raw mut (*a.cq).fid, sys::FI_GETWAIT, (&raw mut fd).cast());
            assert_eq!(none, -sys::FI_ENODATA);
        }
        let readable = |milliseconds| {
            let mut fds = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
            // SAFETY: one descriptor.
            unsafe { libc::poll(fds.as_mut_ptr(), 1, milliseconds) == 1 }
        };
        let trywait = || {
            // SAFETY: one open queue.
            unsafe { sys::fi_trywait(node.fabric, [&raw mut (*b.cq).fid].as_mut_ptr(), 1) }
        };
        let (mut context, address, key) = (context(), memory.address() + 32, memory.key());
        let mut write = || {
            let write =
                Write { memory: &memory, offset: 0, len: 8, data: Some(1), to, address, key };
            assert_eq!(a.post(&write, at(&mut context)), 0);
            assert!(matches!(a.next(), Event::Done { .. }));
        };
        assert_eq!(trywait(), 0);
        assert!(!readable(50));
        write();
        assert!(readable(5000));
        assert_eq!(trywait(), -sys::FI_EAGAIN);
        assert!(matches!(b.next(), Event::Done { .. }));
        // Not armed: it sleeps on, whatever comes. It has come by then, or as soon as its thread runs.
        write();
        assert!(!readable(100));
        let start = Instant::now();
        while trywait() == 0 {
            assert!(start.elapsed() < PATIENCE, "nothing came");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(trywait(), -sys::FI_EAGAIN);
        assert!(matches!(b.next(), Event::Done { .. }));
        assert_eq!(trywait(), 0);
        write();
        assert!(readable(5000));
        drop(memory);
        a.close();
        b.close();
        node.close();
        fake.broken(&[]);
    });
}

#[test]
fn the_queue_is_full_when_it_is_and_now_and_then() {
    alone(
        "delivery::the_queue_is_full_when_it_is_and_now_and_then",
        &[("FAKE_EFA_TX_SIZE", "8")],
        |fake| {
            let pair = Pair::new(fake);
            let memory = pair.node.memory(64, 1);
            let (to, address, key) = (pair.to_b, memory.address(), memory.key());
            let write = Write {
                memory: &memory,
                offset: 0,
                len: 8,
                data: None,
                to,
                address: address + 32,
                key,
            };
            let again = -(sys::FI_EAGAIN as isize);
            let mut contexts: Vec<_> = (0..9).map(|_| context()).collect();
            for context in &mut contexts[..8] {
                assert_eq!(pair.a.post(&write, at(context)), 0);
            }
            // A place is free once its completion was read, not before.
            std::thread::sleep(Duration::from_millis(100));
            for _ in 0..100 {
                assert_eq!(pair.a.try_post(&write, at(&mut contexts[8])), again);
            }
            assert!(matches!(pair.a.next(), Event::Done { .. }));
            assert_eq!(pair.a.post(&write, at(&mut contexts[8])), 0);
            for _ in 0..8 {
                assert!(matches!(pair.a.next(), Event::Done { .. }));
            }
            let mut refused = 0;
            for _ in 0..1000 {
                if pair.a.try_post(&write, at(&mut contexts[0])) == again {
                    refused += 1;
                } else {
                    assert!(matches!(pair.a.next(), Event::Done { .. }));
                }
            }
            assert!((10..100).contains(&refused), "{refused} of 1000");
            drop(memory);
            pair.close();
            fake.broken(&[]);
        },
    );
}

#[test]
fn fabric_efa_lifts_the_rules_that_it_lifts() {
    let name = "delivery::fabric_efa_lifts_the_rules_that_it_lifts";
    alone(name, &[("FAKE_EFA_FABRICS", "efa"), ("FAKE_EFA_MAX_RMA", "4096")], |fake| {
        let hints = fake.hints(|hints| {
            name_fabric(hints, text("efa"));
            hints.mode = 0;
            domain(hints).mr_mode &= !sys::FI_MR_LOCAL;
        });
        let node = Node::open(fake, fake.getinfo(API, Some(&hints)).unwrap());
        let (a, b) = (node.side(64), node.side(64));
        let (to, target) = (a.insert(b.address()), node.memory(1 << 17, 0));
        let source = vec![6_u8; 1 << 17];
        // SAFETY: the source stays until the completion was read.
        while unsafe {
            let (buf, desc, context) = (source.as_ptr().cast(), std::ptr::null_mut(), 8 as *mut _);
            sys::fi_writedata(
                a.ep,
                buf,
                1 << 17,
                desc,
                3,
                to,
                target.address(),
                target.key(),
                context,
            )
        } != 0
        {}
        assert!(matches!(a.next(), Event::Done { context: 8, .. }));
        assert!(matches!(b.next(), Event::Done { data: 3, from: sys::FI_ADDR_NOTAVAIL, .. }));
        assert!((0..1 << 17).all(|at| target.byte(at) == 6));
        drop(target);
        a.close();
        b.close();
        node.close();
        fake.broken(&[]);
    });
}

/// Returns bytes as text.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns an address from text.
pub(crate) fn unhex(text: &str) -> [u8; 32] {
    std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
}
