//! A driver that keeps what it is called for: what extended posts and polls say to it, and which memory is registered how.

use std::cell::RefCell;

use super::*;

/// What a driver was called for, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Called {
    Start,
    /// Number, flags, key, address, and an immediate in network order.
    Write(u64, u32, u32, u64, Option<u32>),
    Inline(u64, usize),
    Sge(u32, u64, u32),
    List(usize),
    Complete,
}

thread_local! {
    static CALLED: RefCell<Vec<Called>> = const { RefCell::new(Vec::new()) };
    /// What is left to be polled, the next one last; whether one is being read; and what comes when there is none.
    static LEFT: RefCell<(Vec<sys::ibv_wc>, bool, c_int)> =
        const { RefCell::new((Vec::new(), false, 0)) };
}

fn called(what: Called) {
    CALLED.with_borrow_mut(|all| all.push(what));
}

unsafe extern "C" fn start(_: *mut sys::ibv_qp_ex) {
    called(Called::Start);
}

unsafe extern "C" fn write(qp: *mut sys::ibv_qp_ex, rkey: u32, to: u64) {
    // SAFETY: the test's own, which lives.
    let (number, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    called(Called::Write(number, flags, rkey, to, None));
}

unsafe extern "C" fn write_imm(qp: *mut sys::ibv_qp_ex, rkey: u32, to: u64, imm: u32) {
    // SAFETY: as above.
    let (number, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    called(Called::Write(number, flags, rkey, to, Some(imm)));
}

unsafe extern "C" fn inline(_: *mut sys::ibv_qp_ex, at: *mut c_void, length: usize) {
    called(Called::Inline(at as u64, length));
}

unsafe extern "C" fn sge(_: *mut sys::ibv_qp_ex, lkey: u32, at: u64, length: u32) {
    called(Called::Sge(lkey, at, length));
}

unsafe extern "C" fn list(_: *mut sys::ibv_qp_ex, count: usize, _: *const sys::ibv_sge) {
    called(Called::List(count));
}

unsafe extern "C" fn complete(qp: *mut sys::ibv_qp_ex) -> c_int {
    called(Called::Complete);
    // SAFETY: as above.
    c_int::try_from(unsafe { (*qp).comp_mask }).unwrap()
}

/// Chains of up to three writes, each of all kinds; a driver that takes them, and one that does not: what it is called for is
/// what each write says, in order, with one setter each, between one start and one end.
#[test]
fn extended_posts_say_each_write_as_it_is() {
    // SAFETY: all zero is a value of the type.
    let mut queue: sys::ibv_qp_ex = unsafe { core::mem::zeroed() };
    // SAFETY: it is live.
    assert!(!unsafe { sys::has_writes(NonNull::from(&mut queue)) });
    queue.wr_start = Some(start);
    queue.wr_complete = Some(complete);
    queue.wr_rdma_write = Some(write);
    queue.wr_rdma_write_imm = Some(write_imm);
    queue.wr_set_inline_data = Some(inline);
    queue.wr_set_sge = Some(sge);
    queue.wr_set_sge_list = Some(list);
    let mut chain = Chain::new();
    for count in 0..4_u32 {
        for word in 0..8_u32.pow(count) {
            for code in [0, libc::ENOMEM] {
                let mut expected = vec![Called::Start];
                for at in 0..count {
                    let kind = word / 8_u32.pow(at) % 8;
                    let (number, from, to) = (u64::from(at), 4096 + u64::from(at), 1 << 40);
                    let imm = (kind & 1 != 0).then_some(0x0102_0304 + at);
                    let (len, inline) = [(0, false), (9, false), (9, true), (1 << 20, false)]
                        [usize::try_from(kind / 2).unwrap()];
                    let (local_key, remote_key) = (70 + at, 80 + at);
                    let signalled = at + 1 == count;
                    let write = Write { number, from, len, local_key, to, remote_key, imm, inline };
                    chain.push(&write, signalled);
                    let mut flags = if signalled { sys::IBV_SEND_SIGNALED } else { 0 };
                    if inline {
                        flags |= sys::IBV_SEND_INLINE;
                    }
                    let imm = imm.map(u32::to_be);
                    expected.push(Called::Write(number, flags, remote_key, to, imm));
                    expected.push(match (len, inline) {
                        (0, _) => Called::List(0),
                        (_, true) => Called::Inline(from, 9),
                        (len, false) => Called::Sge(local_key, from, len),
                    });
                }
                expected.push(Called::Complete);
                queue.comp_mask = u64::try_from(code).unwrap();
                // SAFETY: a queue that has all of these calls, which touch nothing.
                let posted = unsafe {
                    let queue = NonNull::from(&mut queue);
                    assert!(sys::has_writes(queue));
                    let works = chain.works.iter().zip(chain.sges.iter()).take(chain.len);
                    QueuePair::post_extended(queue, works)
                };
                let said = posted.map_err(|(taken, error)| (taken, error.raw_os_error()));
                assert_eq!(said, if code == 0 { Ok(()) } else { Err((0, Some(code))) });
                assert_eq!(CALLED.take(), expected);
                chain.clear();
            }
        }
    }
}

/// Which completion is being read.
fn current() -> sys::ibv_wc {
    LEFT.with_borrow(|(left, is_open, _)| {
        assert!(is_open, "nothing is being read");
        *left.last().unwrap()
    })
}

unsafe extern "C" fn start_poll(cq: *mut sys::ibv_cq_ex, _: *mut sys::ibv_poll_cq_attr) -> c_int {
    LEFT.with_borrow_mut(|(left, is_open, end)| {
        assert!(!*is_open, "the last one was not ended");
        let Some(next) = left.last() else { return *end };
        *is_open = true;
        // SAFETY: the test's own, which lives.
        unsafe { ((*cq).wr_id, (*cq).status) = (next.wr_id, next.status) };
        0
    })
}

unsafe extern "C" fn end_poll(_: *mut sys::ibv_cq_ex) {
    let _ = current();
    LEFT.with_borrow_mut(|(left, is_open, _)| {
        left.pop();
        *is_open = false;
    });
}

/// Of one that has not failed.
fn good() -> sys::ibv_wc {
    let current = current();
    assert_eq!(current.status, sys::IBV_WC_SUCCESS, "the rest is undefined");
    current
}

/// And has come.
fn came() -> sys::ibv_wc {
    let current = good();
    assert!(current.opcode & sys::IBV_WC_RECV != 0, "a write has none");
    current
}

unsafe extern "C" fn opcode(_: *mut sys::ibv_cq_ex) -> sys::ibv_wc_opcode {
    good().opcode
}

unsafe extern "C" fn qp_num(_: *mut sys::ibv_cq_ex) -> u32 {
    current().qp_num
}

unsafe extern "C" fn byte_len(_: *mut sys::ibv_cq_ex) -> u32 {
    came().byte_len
}

unsafe extern "C" fn imm_data(_: *mut sys::ibv_cq_ex) -> u32 {
    came().imm_data
}

unsafe extern "C" fn slid(_: *mut sys::ibv_cq_ex) -> u32 {
    came().slid.into()
}

unsafe extern "C" fn wc_flags(_: *mut sys::ibv_cq_ex) -> u32 {
    assert_eq!(good().opcode, sys::IBV_WC_RECV, "nobody asks for a write's");
    came().wc_flags
}

/// None to three completions of each kind, and a full batch and one more; then none, or an error: each is read once, no more
/// of it than it has, and each that was begun is ended.
#[test]
fn extended_polls_read_what_a_completion_has() {
    // SAFETY: all zero is a value of the type.
    let mut queue: sys::ibv_cq_ex = unsafe { core::mem::zeroed() };
    // SAFETY: it is live.
    assert!(!unsafe { sys::has_polls(NonNull::from(&mut queue)) });
    queue.start_poll = Some(start_poll);
    queue.end_poll = Some(end_poll);
    queue.read_opcode = Some(opcode);
    queue.read_qp_num = Some(qp_num);
    queue.read_byte_len = Some(byte_len);
    queue.read_imm_data = Some(imm_data);
    queue.read_slid = Some(slid);
    queue.read_wc_flags = Some(wc_flags);
    let queue = NonNull::from(&mut queue);
    // SAFETY: it is live.
    assert!(unsafe { sys::has_polls(queue) });
    let kinds = [
        (sys::IBV_WC_SUCCESS, 0),
        (sys::IBV_WC_SUCCESS, sys::IBV_WC_RECV),
        (sys::IBV_WC_SUCCESS, sys::IBV_WC_RECV_RDMA_WITH_IMM),
        (sys::IBV_WC_WR_FLUSH_ERR, sys::IBV_WC_RECV_RDMA_WITH_IMM),
    ];
    let made = |word: usize, count: usize| -> Vec<sys::ibv_wc> {
        let kind = |at| kinds[word / 4_usize.pow(u32::try_from(at).unwrap_or(0) % 4) % 4];
        (0..count)
            .map(|at| {
                // SAFETY: all zero is a value of the type.
                let mut made: sys::ibv_wc = unsafe { core::mem::zeroed() };
                let number = u32::try_from(at).unwrap();
                (made.status, made.opcode) = kind(at);
                (made.wr_id, made.qp_num) = (u64::from(number) + 7, number + 100);
                (made.byte_len, made.imm_data, made.slid) = (number + 9, !number, 513);
                made.wc_flags = number % 2 * sys::IBV_WC_GRH;
                made
            })
            .collect()
    };
    for (word, count) in
        (0..64).flat_map(|word| [0, 1, 2, 3, BATCH, BATCH + 1].map(|count| (word, count)))
    {
        for end in [libc::ENOENT, libc::EIO] {
            let all = made(word, count);
            LEFT.set((all.iter().rev().copied().collect(), false, end));
            let mut into = Completions::new();
            let mut read = Vec::new();
            let well = loop {
                let well = Completed::read_extended(queue, &mut into);
                if into.is_empty() {
                    break well;
                }
                assert!(well);
                read.extend(into.by_ref());
            };
            assert_eq!(well, end == libc::ENOENT);
            assert_eq!(read.len(), count);
            for (read, made) in read.iter().zip(&all) {
                assert_eq!((read.wr_id, read.status), (made.wr_id, made.status));
                let good = made.status == sys::IBV_WC_SUCCESS;
                if made.opcode & sys::IBV_WC_RECV != 0 || !good {
                    assert_eq!(read.qp_num, made.qp_num);
                }
                if made.opcode & sys::IBV_WC_RECV != 0 && good {
                    let parts = |it: &sys::ibv_wc| (it.opcode, it.byte_len, it.imm_data, it.slid);
                    assert_eq!(parts(read), parts(made));
                    if made.opcode == sys::IBV_WC_RECV {
                        assert_eq!(read.wc_flags, made.wc_flags);
                    }
                }
            }
        }
    }
}

#[test]
fn memory_is_registered_for_what_it_is_and_never_a_gpu_s_on_demand() {
    for bits in 0..16 {
        let [remote, received, on_demand, of_gpu] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
        let flags = Access { remote, received, on_demand }.flags(of_gpu);
        let has = |flag| flags & flag != 0;
        assert_eq!(has(sys::IBV_ACCESS_LOCAL_WRITE), remote || received);
        assert_eq!(has(sys::IBV_ACCESS_REMOTE_WRITE), remote);
        assert_eq!(has(sys::IBV_ACCESS_RELAXED_ORDERING), remote);
        assert_eq!(has(sys::IBV_ACCESS_ON_DEMAND), on_demand && !of_gpu);
    }
}

/// Devices whose sends carry up to so many bytes themselves: each that has room for a letter fits, with no more than it takes.
#[test]
fn a_device_fits_if_its_sends_carry_a_letter_and_carries_no_more_than_it_takes() {
    let refuses = || refused("ibv_create_qp", libc::EINVAL);
    for most in 0..200 {
        let found = carried(|bytes| if bytes <= most { Ok(()) } else { Err(refuses()) });
        match found {
            Ok(bytes) => {
                assert_eq!(bytes, if most >= INLINE_BYTES { INLINE_BYTES } else { LETTER_BYTES });
                assert!((LETTER_BYTES..=most).contains(&bytes), "{bytes} of {most}");
            }
            Err(error) => {
                assert!(most < LETTER_BYTES, "{most}: {error}");
                let words = format!("its sends carry fewer than {LETTER_BYTES} bytes themselves");
                assert_eq!(error.to_string(), words);
            }
        }
    }
    // One that makes none says why.
    let said = carried(|_| Err(refused("ibv_create_qp", libc::ENOMEM))).unwrap_err().to_string();
    assert!(said.starts_with("ibv_create_qp: "), "{said}");
}

/// Only what is there is taken by its index; of what else there may be it is said that the index is at fault, and not the device.
#[test]
fn a_gid_index_that_leads_nowhere_is_named() {
    let entry = GidEntry { index: 3, gid: Gid::NONE, kind: GidKind::RoceV2 };
    assert_eq!(given_gid(3, Ok(Some(entry))).unwrap().index, 3);
    let past_the_end = refused("ibv_query_gid_ex", libc::EINVAL);
    for found in [Ok(None), Err(past_the_end)] {
        let said = given_gid(200, found).unwrap_err().to_string();
        assert!(said.contains("at index 200, which was given: leave gid_index out"), "{said}");
    }
    let other = given_gid(3, Err(refused("ibv_query_gid_ex", libc::EIO))).unwrap_err().to_string();
    assert!(other.starts_with("ibv_query_gid_ex: "), "{other}");
}

/// Memory that cannot be pinned may be a limit's fault; nothing else is.
#[test]
fn what_finds_no_memory_to_pin_names_the_limit() {
    let hint = "(ulimit -l may be too low)";
    for (call, errno, is_said) in [
        ("ibv_reg_mr", libc::ENOMEM, true),
        // Queues lie in memory that drivers pin as well.
        ("ibv_create_cq", libc::ENOMEM, true),
        ("ibv_create_cq_ex", libc::ENOMEM, true),
        ("ibv_resize_cq", libc::ENOMEM, true),
        ("ibv_create_srq", libc::ENOMEM, true),
        ("ibv_create_qp", libc::ENOMEM, true),
        ("ibv_create_qp_ex", libc::ENOMEM, true),
        ("ibv_create_qp", libc::EINVAL, false),
        ("ibv_reg_mr", libc::EFAULT, false),
        ("ibv_alloc_pd", libc::ENOMEM, false),
    ] {
        let said = refused(call, errno).to_string();
        assert_eq!(said.ends_with(hint), is_said, "{said}");
    }
    let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
    let error = crate::RegisterError::Os { call: "ibv_reg_mr", bytes: 4096, source };
    assert!(error.to_string().ends_with(hint), "{error}");
}
