//! The bounce ring: what was put in comes out, once, before its place is used again; and not after the end.

use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::PeerId;
use immwire_core::imm::Imm;
use immwire_core::plan::PageRun;
use immwire_verification_loom::{Bound, clause, explore, thread};
use loom::sync::Arc;

use crate::bounce::{Reader, Taken, Writer};
use crate::memory::{REFUSED_KEY, ShmMemory, destination};
use crate::segment::Segment;

/// A piece of eight bytes from the source `n`.
fn piece(n: u64, key: u64) -> WorkRequest {
    WorkRequest {
        token: Token::from_bits(n),
        nic: 0,
        remote_nic: 0,
        peer: PeerId { index: 0, generation: 0 },
        src: n,
        src_key: 0,
        dst: destination(n),
        dst_key: key,
        len: 8,
        run: PageRun::NONE,
        imm: Some(Imm::from_bits(u32::try_from(n).unwrap())),
    }
}

/// Three pieces through a ring of two records; the second is for a region that was withdrawn.
///
/// *Fails if* head or tail is published or read `Relaxed`: the data of a record race, or its status is that of
/// the record before.
#[test]
fn records_come_once_and_in_order_and_so_do_their_ends() {
    explore(clause::TRANSPORT, Bound::Preemptions(3), 25_000, || {
        let segment = Segment::new();
        Writer::open(segment.half());
        let reader = {
            let segment = segment.clone();
            thread::spawn(move || {
                let (mut reader, memory) = (Reader::default(), ShmMemory::new());
                for n in 1..=3 {
                    let taken = loop {
                        match reader.take(segment.half(), &memory, 1).unwrap() {
                            Some(taken) => break taken,
                            None => thread::yield_now(),
                        }
                    };
                    let imm = (n != 2).then_some((0, n));
                    assert_eq!(taken, Taken { imm });
                }
                assert_eq!(reader.take(segment.half(), &memory, 1), Ok(None));
            })
        };
        let mut writer = Writer::default();
        for n in 1..=3 {
            writer.start(piece(n, if n == 2 { REFUSED_KEY } else { 7 }));
        }
        let mut ends = Vec::new();
        while !writer.is_idle() {
            let put = writer.pump(segment.half());
            let ended = writer.reap(segment.half(), |work, end| ends.push((work.src, end)));
            if !ended.unwrap() && !put {
                thread::yield_now();
            }
        }
        let refused = Err(WorkError::RemoteAccess);
        assert_eq!(ends, [(1, Ok(())), (2, refused), (3, Ok(()))]);
        reader.join().unwrap();
        Segment::forget();
    });
}

/// The writer calls back what lies in the ring while the reader delivers it.
///
/// *Fails if* the reader delivers without the grant, or lets go of it before it has: the memory is then
/// written after the writer was told that all is quiet.
#[test]
fn nothing_of_a_closed_ring_is_delivered() {
    explore(clause::ENDS, Bound::None, 50, || {
        let segment = Segment::new();
        Writer::open(segment.half());
        let mut writer = Writer::default();
        writer.start(piece(1, 7));
        writer.pump(segment.half());
        let memory = Arc::new(ShmMemory::new());
        let reader = {
            let (segment, memory) = (segment.clone(), memory.clone());
            thread::spawn(move || {
                let mut reader = Reader::default();
                reader.take(segment.half(), &memory, 1).unwrap().is_some()
            })
        };
        Writer::close(segment.half());
        while !Writer::is_quiet(segment.half()) {
            thread::yield_now();
        }
        memory.set(5);
        reader.join().unwrap();
        Segment::forget();
    });
}
