//! What callers may not do: each is refused as documented, and named in the log.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fake_efa::disorder::{Choice, Disorder};
use libfabric_sys as sys;

use crate::rig::*;

#[test]
fn an_endpoint_is_bound_before_it_is_enabled() {
    alone("strictness::an_endpoint_is_bound_before_it_is_enabled", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (ep, other, av, cq) = (node.ep(), node.ep(), node.av(), node.cq(16, sys::FI_WAIT_NONE));
        let memory = node.memory(64, 0);
        let (mut name, mut len, mut mine) = ([0_u8; 32], 32, context());
        // SAFETY: all is open, or found not to be; buffers have the room they say.
        unsafe {
            let (cq, av) = (&raw mut (*cq).fid, &raw mut (*av).fid);
            assert_eq!(sys::fi_enable(ep), -sys::FI_ENOAV);
            fine(sys::fi_ep_bind(ep, av, 0));
            assert_eq!(sys::fi_enable(ep), -sys::FI_ENOCQ);
            assert_eq!(sys::fi_ep_bind(ep, cq, 0), -sys::FI_EBADFLAGS);
            fine(sys::fi_ep_bind(ep, cq, sys::FI_TRANSMIT));
            assert_eq!(sys::fi_enable(ep), -sys::FI_ENOCQ);
            fake.broken(&["not bound", "not bound", "flags", "not bound"]);
            fine(sys::fi_ep_bind(ep, cq, sys::FI_RECV));

            assert_eq!(
                sys::fi_getname(ep, name.as_mut_ptr().cast(), &raw mut len),
                -sys::FI_EOPBADSTATE
            );
            let write = |ep| {
                sys::fi_write(
                    ep,
                    memory.pointer(),
                    8,
                    memory.desc(),
                    0,
                    memory.address(),
                    memory.key(),
                    at(&mut mine),
                )
            };
            assert_eq!({ write }(ep), -(sys::FI_EOPBADSTATE as isize));
            fine(sys::fi_enable(ep));
            assert_eq!(sys::fi_enable(ep), -sys::FI_EOPBADSTATE);
            assert_eq!(sys::fi_ep_bind(ep, cq, sys::FI_RECV), -sys::FI_EOPBADSTATE);
            let state = "wrong state";
            let so_far =
                ["not bound", "not bound", "flags", "not bound", state, state, state, state];
            fake.broken(&so_far);
            // The length is told, and that is no violation.
            len = 0;
            assert_eq!(sys::fi_getname(ep, null_mut(), &raw mut len), -sys::FI_ETOOSMALL);
            assert_eq!(len, 32);
            // One address vector, one endpoint.
            assert_eq!(sys::fi_ep_bind(other, av, 0), -sys::FI_ENOSYS);
            assert_eq!(fake.violations().split_off(so_far.len()), ["address vector shared"]);
            // What an endpoint stands on stays.
            assert_eq!(sys::fi_close(cq), -sys::FI_EBUSY);
            assert_eq!(sys::fi_close(av), -sys::FI_EBUSY);
            assert_eq!(sys::fi_close(&raw mut (*node.domain).fid), -sys::FI_EBUSY);
            assert_eq!(sys::fi_close(&raw mut (*node.fabric).fid), -sys::FI_EBUSY);
            assert_eq!(fake.violations().split_off(so_far.len() + 1), ["closed while in use"; 4]);
            for fid in [&raw mut (*ep).fid, &raw mut (*other).fid, cq, av] {
                fine(sys::fi_close(fid));
            }
            assert_eq!(sys::fi_close(cq), -sys::FI_EINVAL);
            assert_eq!(sys::fi_cq_read(cq.cast(), null_mut(), 0), -(sys::FI_EINVAL as isize));
            assert_eq!(fake.violations().split_off(so_far.len() + 5), ["used after close"; 2]);
        }
        drop(memory);
        node.close();
    });
}

#[test]
fn where_no_log_is_named_the_process_ends() {
    let said = unheard("strictness::where_no_log_is_named_the_process_ends", |fake| {
        let node = Node::open(fake, fake.info());
        // SAFETY: an open endpoint; what it lacks is the rule that is broken.
        unsafe { sys::fi_enable(node.ep()) };
    });
    assert!(said.contains("fake-efa: not bound"), "{said}");
}

#[test]
fn required_modes_stay_in_the_info() {
    alone("strictness::required_modes_stay_in_the_info", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (mut domain, mut ep) = (null_mut(), null_mut());
        // SAFETY: the info is the library's.
        unsafe {
            let info = node.info.info;
            (*info).mode = 0;
            assert_eq!(
                sys::fi_endpoint(node.domain, info, &raw mut ep, null_mut()),
                -sys::FI_EINVAL
            );
            assert_eq!(
                sys::fi_domain(node.fabric, info, &raw mut domain, null_mut()),
                -sys::FI_EINVAL
            );
            (*info).mode = sys::FI_CONTEXT2;
            (*(*info).domain_attr).mr_mode &= !sys::FI_MR_LOCAL;
            assert_eq!(
                sys::fi_domain(node.fabric, info, &raw mut domain, null_mut()),
                -sys::FI_EINVAL
            );
        }
        node.close();
        fake.broken(&["required mode missing"; 3]);
    });
}

#[test]
fn a_write_keeps_to_the_limits() {
    alone("strictness::a_write_keeps_to_the_limits", &[("FAKE_EFA_MAX_RMA", "4096")], |fake| {
        let pair = Pair::new(fake);
        let memory = pair.node.memory(1 << 14, 1);
        let mut mine = context();
        let mine = at(&mut mine);
        let write = Write {
            memory: &memory,
            offset: 0,
            len: 4096,
            data: Some(1),
            to: pair.to_b,
            address: memory.address() + 8192,
            key: memory.key(),
        };
        let refused =
            |write: Write<'_>, errno: i32| assert_eq!(pair.a.post(&write, mine), -(errno as isize));
        refused(Write { len: 4097, ..write }, sys::FI_EMSGSIZE);
        refused(Write { data: Some(1 << 32), ..write }, sys::FI_EINVAL);
        refused(Write { key: write.key | 1 << 32, ..write }, sys::FI_EINVAL);
        refused(Write { to: 17, ..write }, sys::FI_EINVAL);
        let limits = [
            "write too long",
            "more than four bytes",
            "more than four bytes",
            "address not inserted",
        ];
        fake.broken(&limits);

        let iov = [libc::iovec { iov_base: memory.pointer(), iov_len: 8 }; 2];
        let remote = [sys::fi_rma_iov { addr: write.address, len: 8, key: write.key }; 2];
        let mut desc = [memory.desc(); 2];
        let message = sys::fi_msg_rma {
            msg_iov: iov.as_ptr(),
            desc: desc.as_mut_ptr(),
            iov_count: 1,
            addr: write.to,
            rma_iov: remote.as_ptr(),
            rma_iov_count: 1,
            context: mine,
            data: 9,
        };
        // SAFETY: all that they point to lives.
        let post = |message: sys::fi_msg_rma, flags| unsafe {
            sys::fi_writemsg(pair.a.ep, &raw const message, flags)
        };
        let two = sys::fi_msg_rma { iov_count: 2, rma_iov_count: 2, ..message };
        assert_eq!(post(two, 0), -(sys::FI_EINVAL as isize));
        assert_eq!(post(message, sys::FI_INJECT), -(sys::FI_ENOSYS as isize));
        assert_eq!(post(message, sys::FI_DELIVERY_COMPLETE), -(sys::FI_EBADFLAGS as isize));
        assert_eq!(post(message, sys::FI_FENCE), -(sys::FI_EBADFLAGS as isize));
        // SAFETY: inline writes are refused before anything is looked at.
        unsafe {
            let inject = (*(*pair.a.ep).rma).inject.unwrap();
            let result = inject(pair.a.ep, memory.pointer(), 8, write.to, write.address, write.key);
            assert_eq!(result, -(sys::FI_ENOSYS as isize));
            let read = sys::fi_read(
                pair.a.ep,
                memory.pointer(),
                8,
                desc[0],
                write.to,
                write.address,
                write.key,
                mine,
            );
            assert_eq!(read, -(sys::FI_ENOSYS as isize));
        }
        let calls = ["not one buffer", "inject", "flags", "flags", "inject", "not modelled"];
        assert_eq!(fake.violations().split_off(limits.len()), calls);

        // With its flag it is a write with data.
        while post(message, sys::FI_REMOTE_CQ_DATA) == -(sys::FI_EAGAIN as isize) {}
        assert!(matches!(pair.b.next(), Event::Done { data: 9, len: 8, .. }));
        assert!(matches!(pair.a.next(), Event::Done { .. }));
        assert_eq!(fake.violations().len(), limits.len() + calls.len());
        drop(memory);
        pair.close();
    });
}

#[test]
fn descriptors_are_of_this_memory_and_allow_it() {
    alone("strictness::descriptors_are_of_this_memory_and_allow_it", &[], |fake| {
        let pair = Pair::new(fake);
        let memory = pair.node.memory(64, 1);
        let target = pair.node.memory_for(64, 0, sys::FI_REMOTE_WRITE);
        let other = Node::open(fake, fake.info());
        let foreign = other.memory(64, 2);
        let mut mine = context();
        let mine = at(&mut mine);
        let (to, address, key) = (pair.to_b, target.address(), target.key());
        let post = |len, desc| loop {
            // SAFETY: memory and context stay.
            let result = unsafe {
                sys::fi_writedata(pair.a.ep, memory.pointer(), len, desc, 1, to, address, key, mine)
            };
            if result != -(sys::FI_EAGAIN as isize) {
                return result;
            }
        };
        let local_key = (sys::FI_EINVAL, 5);
        assert_eq!(post(8, null_mut()), -(sys::FI_EINVAL as isize));
        assert_eq!(post(8, mine), -(sys::FI_EINVAL as isize));
        assert_eq!(post(8, target.desc()), -(sys::FI_EACCES as isize));
        fake.broken(&["descriptor missing", "descriptor unknown", "registration does not allow"]);
        // What only the device notices comes as a completion.
        assert_eq!(post(65, memory.desc()), 0);
        assert_eq!(pair.a.failure(), local_key);
        assert_eq!(post(8, foreign.desc()), 0);
        assert_eq!(pair.a.failure(), local_key);
        assert_eq!(
            fake.violations().split_off(3),
            ["descriptor does not cover", "descriptor unknown"]
        );
        // Nothing needs no descriptor.
        assert_eq!(post(0, null_mut()), 0);
        assert!(matches!(pair.b.next(), Event::Done { len: 0, .. }));
        assert!(matches!(pair.a.next(), Event::Done { .. }));
        assert_eq!(fake.violations().len(), 5);
        drop((memory, target, foreign));
        pair.close();
        other.close();
    });
}

#[test]
fn registrations_follow_their_rules() {
    alone("strictness::registrations_follow_their_rules", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (one, two) = (node.memory(4096, 0), node.memory(4096, 0));
        assert!(
            one.key() != two.key() && one.key() <= u64::from(u32::MAX) && !one.desc().is_null()
        );
        let mut mr = null_mut();
        // SAFETY: what is registered is refused, and not touched.
        unsafe {
            let reg = |buf: *mut _, len, access, offset, flags, mr: &mut *mut sys::fid_mr| {
                sys::fi_mr_reg(
                    node.domain,
                    buf,
                    len,
                    access,
                    offset,
                    0,
                    flags,
                    &raw mut *mr,
                    null_mut(),
                )
            };
            let buf = one.pointer();
            assert_eq!(reg(buf, 4096, 0, 0, 0, &mut mr), -sys::FI_EINVAL);
            assert_eq!(reg(buf, 0, sys::FI_SEND, 0, 0, &mut mr), -sys::FI_EINVAL);
            assert_eq!(reg(buf, 64, sys::FI_SEND, 8, 0, &mut mr), -sys::FI_EINVAL);
            assert_eq!(
                reg(buf, 64, sys::FI_SEND, 0, sys::FI_MR_DMABUF, &mut mr),
                -sys::FI_EBADFLAGS
            );
            assert_eq!(reg(4096 as *mut _, 4096, sys::FI_SEND, 0, 0, &mut mr), -sys::FI_EFAULT);
            let mut attr: sys::fi_mr_attr = std::mem::zeroed();
            let iov = libc::iovec { iov_base: buf, iov_len: 64 };
            (attr.mr_iov, attr.iov_count, attr.access) = (&raw const iov, 1, sys::FI_WRITE);
            attr.iface = sys::FI_HMEM_CUDA;
            assert_eq!(
                sys::fi_mr_regattr(node.domain, &raw const attr, 0, &raw mut mr),
                -sys::FI_EOPNOTSUPP
            );
            fake.broken(&["registration refused"; 6]);
            attr.iface = sys::FI_HMEM_SYSTEM;
            fine(sys::fi_mr_regattr(node.domain, &raw const attr, 0, &raw mut mr));
            fine(sys::fi_close(&raw mut (*mr).fid));
        }
        fake.broken(&["registration refused"; 6]);
        drop((one, two));
        node.close();
    });
}

#[test]
fn contexts_are_lent_one_each_and_left_alone() {
    alone(
        "strictness::contexts_are_lent_one_each_and_left_alone",
        &[("FAKE_EFA_DELAY_US", "50000")],
        |fake| {
            let pair = Pair::new(fake);
            let memory = pair.node.memory(64, 1);
            let (to, address, key) = (pair.to_b, memory.address() + 32, memory.key());
            let write = Write { memory: &memory, offset: 0, len: 8, data: None, to, address, key };
            let mut room = Box::new([0_u64; 16]);
            let room = room.as_mut_ptr();
            let einval = -(sys::FI_EINVAL as isize);
            assert_eq!(pair.a.post(&write, null_mut()), einval);
            // SAFETY: inside of `room`.
            let (first, overlapping, odd) =
                unsafe { (room, room.add(7), room.cast::<u8>().add(1)) };
            assert_eq!(pair.a.post(&write, odd.cast()), einval);
            assert_eq!(pair.a.post(&write, first.cast()), 0);
            assert_eq!(pair.a.post(&write, first.cast()), einval);
            assert_eq!(pair.a.post(&write, overlapping.cast()), einval);
            let so_far = ["context missing", "context shared", "context shared", "context shared"];
            fake.broken(&so_far);
            // SAFETY: inside of `room`. The provider owns all 64 bytes.
            assert!((0..8).all(|word| unsafe { room.add(word).read_volatile() } != 0));
            assert!(
                matches!(pair.a.next(), Event::Done { context, .. } if context == room as usize)
            );
            // Read, and so free: two fit beside each other.
            assert_eq!(pair.a.post(&write, first.cast()), 0);
            // SAFETY: inside of `room`.
            assert_eq!(pair.a.post(&write, unsafe { room.add(8) }.cast()), 0);
            (0..2).for_each(|_| assert!(matches!(pair.a.next(), Event::Done { .. })));
            fake.broken(&so_far);
            // Even after it completed, until that was read: the provider looks at it then.
            assert_eq!(pair.a.post(&write, first.cast()), 0);
            std::thread::sleep(Duration::from_millis(500));
            // SAFETY: inside of `room`.
            unsafe { room.add(7).write_volatile(1) };
            assert!(matches!(pair.a.next(), Event::Done { .. }));
            assert_eq!(fake.violations().split_off(so_far.len()), ["context damaged"]);
            // And if it never is: at the close.
            assert_eq!(pair.a.post(&write, first.cast()), 0);
            // SAFETY: inside of `room`.
            unsafe { room.write_volatile(1) };
            drop_all(pair, memory);
            assert_eq!(
                fake.violations().split_off(so_far.len()),
                ["context damaged", "context damaged"]
            );
        },
    );
}

/// Closes the endpoints first: operations may be in flight.
fn drop_all(pair: Pair, memory: Memory) {
    let Pair { node, a, b, .. } = pair;
    a.close();
    b.close();
    drop(memory);
    node.close();
}

#[test]
fn nothing_is_withdrawn_under_an_operation() {
    // The first is on its way for longer than a thread is kept from running.
    let longest = Duration::from_secs(5);
    let late =
        |seed: &u64| Disorder::new(*seed, 0, longest).delay(Choice::Start, 0, 0) >= longest / 2;
    let seed = (1..).find(late).unwrap().to_string();
    let environment = [("FAKE_EFA_SEED", seed.as_str()), ("FAKE_EFA_DELAY_US", "5000000")];
    alone("strictness::nothing_is_withdrawn_under_an_operation", &environment, |fake| {
        let pair = Pair::new(fake);
        let (mut source, target) = (pair.node.memory(64, 1), pair.node.memory(64, 0));
        let (to, address, key) = (pair.to_b, target.address(), target.key());
        let mut contexts: Vec<_> = (0..2).map(|_| context()).collect();
        let write = Write { memory: &source, offset: 0, len: 8, data: None, to, address, key };
        for context in &mut contexts {
            assert_eq!(pair.a.post(&write, at(context)), 0);
        }
        assert_eq!(pair.a.remove(to), 0);
        fake.broken(&["address removed in use"]);
        source.close();
        fake.broken(&["address removed in use", "registration closed in use"]);
        // What had not left yet fails; what had, does not.
        for _ in 0..2 {
            match pair.a.next() {
                Event::Done { .. } => {}
                Event::Failed { err, prov, .. } => assert_eq!((err, prov), (sys::FI_EINVAL, 5)),
                Event::Dead => panic!("dead"),
            }
        }
        assert_eq!(pair.a.remove(to), -sys::FI_EINVAL);
        assert_eq!(fake.violations().split_off(2), ["address not inserted"]);
        drop(source);
        drop_all(pair, target);
    });
}

#[test]
fn a_queue_that_is_not_credited_dies() {
    alone("strictness::a_queue_that_is_not_credited_dies", &[], |fake| {
        let node = Node::open(fake, fake.info());
        let (a, b) = (node.side(64), node.side(4));
        let (to, memory) = (a.insert(b.address()), node.memory(64, 1));
        b.insert(a.address());
        let (address, key) = (memory.address() + 32, memory.key());
        let write = Write { memory: &memory, offset: 0, len: 8, data: Some(1), to, address, key };
        let mut contexts: Vec<_> = (0..9).map(|_| context()).collect();
        let batch = |contexts: &mut [Box<sys::fi_context2>]| {
            contexts.iter_mut().for_each(|context| assert_eq!(a.post(&write, at(context)), 0));
            contexts.iter().for_each(|_| assert!(matches!(a.next(), Event::Done { .. })));
        };
        batch(&mut contexts[..4]);
        std::thread::sleep(Duration::from_millis(50));
        (0..4).for_each(|_| assert!(matches!(b.next(), Event::Done { .. })));
        fake.broken(&[]);
        batch(&mut contexts[4..]);
        // The target's events come when it has processed them.
        let start = Instant::now();
        while fake.violations().is_empty() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        fake.broken(&["cq overrun"]);
        (0..3).for_each(|_| assert_eq!(b.next(), Event::Dead));
        // Its own writes find no queue either.
        drop(memory);
        a.close();
        b.close();
        node.close();
        fake.broken(&["cq overrun"]);
    });
}

#[test]
fn one_thread_at_a_time_is_in_a_domain() {
    alone("strictness::one_thread_at_a_time_is_in_a_domain", &[], |fake| {
        let run = |threading| {
            let hints = fake.hints(|hints| domain(hints).threading = threading);
            let node = Node::open(fake, fake.getinfo(API, Some(&hints)).unwrap());
            let (a, b) = (node.side(64), node.side(64));
            let (first, second) = (a.cq as usize, b.cq as usize);
            let end = AtomicBool::new(false);
            let read = |cq: usize| {
                while !end.load(Ordering::Relaxed) && fake.violations().is_empty() {
                    for _ in 0..1000 {
                        // SAFETY: it is open; there is room for what is asked for, nothing.
                        let none = unsafe { sys::fi_cq_read(cq as *mut _, null_mut(), 0) };
                        assert_eq!(none, -(sys::FI_EAGAIN as isize));
                    }
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| read(first));
                scope.spawn(|| read(second));
                std::thread::sleep(Duration::from_millis(300));
                let broken = !fake.violations().is_empty();
                if !broken && threading == sys::FI_THREAD_DOMAIN {
                    std::thread::sleep(PATIENCE / 4);
                }
                end.store(true, Ordering::Relaxed);
            });
            a.close();
            b.close();
            node.close();
        };
        run(sys::FI_THREAD_SAFE);
        fake.broken(&[]);
        run(sys::FI_THREAD_DOMAIN);
        let violations = fake.violations();
        assert!(
            !violations.is_empty()
                && violations.iter().all(|rule| rule == "two threads in a domain")
        );
    });
}

/// Device memory is for who asked for it, in the one way that works: a file of CUDA's.
#[test]
fn device_memory_is_registered_by_its_file() {
    alone("strictness::device_memory_is_registered_by_its_file", &[], |fake| {
        let asking = |hints: &mut sys::fi_info| {
            hints.caps |= sys::FI_HMEM;
            domain(hints).mr_mode |= sys::FI_MR_HMEM;
        };
        // What is asked for is required, and what it takes must be understood.
        let without = fake.hints(|hints| hints.caps |= sys::FI_HMEM);
        assert_eq!(fake.getinfo(API, Some(&without)).err(), Some(sys::FI_ENODATA));
        assert_eq!(fake.info().first().caps & sys::FI_HMEM, 0);
        let info = fake.getinfo(API, Some(&fake.hints(asking))).unwrap();
        assert_ne!(info.first().caps & sys::FI_HMEM, 0);
        let node = Node::open(fake, info);
        let one = node.memory(4096, 0);
        let mut mr = null_mut();
        // SAFETY: what is registered is refused, and not touched.
        unsafe {
            let mut attr: sys::fi_mr_attr = std::mem::zeroed();
            let iov = libc::iovec { iov_base: one.pointer(), iov_len: 64 };
            let (fd, offset, len, base_addr) = (0, 0, 64, one.pointer());
            let file = sys::fi_mr_dmabuf { fd, offset, len, base_addr };
            (attr.iov_count, attr.access) = (1, sys::FI_WRITE);
            let mut reg = |iface, by_file: bool| {
                attr.iface = iface;
                attr.mr_iov = if by_file { (&raw const file).cast() } else { &raw const iov };
                let flags = if by_file { sys::FI_MR_DMABUF } else { 0 };
                sys::fi_mr_regattr(node.domain, &raw const attr, flags, &raw mut mr)
            };
            // A CPU would read short writes; peermem is not there; the file is none of a GPU's; and not CUDA's.
            assert_eq!(reg(sys::FI_HMEM_SYSTEM, true), -sys::FI_EINVAL);
            assert_eq!(reg(sys::FI_HMEM_CUDA, false), -sys::FI_EOPNOTSUPP);
            assert_eq!(reg(sys::FI_HMEM_CUDA, true), -sys::FI_EINVAL);
            assert_eq!(reg(sys::FI_HMEM_ROCR, true), -sys::FI_ENOSYS);
        }
        fake.broken(&["registration refused"; 4]);
        drop(one);
        node.close();
    });
}

#[test]
fn a_library_without_device_memory() {
    let system = [("FI_HMEM", "system")];
    alone("strictness::a_library_without_device_memory", &system, |fake| {
        let asking = fake.hints(|hints| {
            hints.caps |= sys::FI_HMEM;
            domain(hints).mr_mode |= sys::FI_MR_HMEM;
        });
        assert_eq!(fake.getinfo(API, Some(&asking)).err(), Some(sys::FI_ENODATA));
    });
}
