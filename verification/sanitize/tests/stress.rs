//! Every way in which threads meet in an engine, at the same time.
//!
//! Each test hands plain memory from thread to thread by way of the engine alone (a `Box`, a `Vec`), so
//! that a missing edge between them is a race that a sanitizer can see.

#![allow(clippy::unwrap_used)] // A panic is how a test fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use immwire::{Driver, MrDesc, PeerId, Region, SingleWrite, Transfer, TransferEngine};
use immwire_core::ring::{Cell, Ring};
use immwire_verification_sanitize::{block_on, rounds};

const LIMIT: Duration = Duration::from_secs(60);
const CALLERS: u64 = 4;
const BYTES: u64 = 256;

fn engine() -> TransferEngine {
    TransferEngine::builder().build().unwrap()
}

fn pair() -> (TransferEngine, TransferEngine, PeerId) {
    let (a, b) = (engine(), engine());
    let peer = a.add_peer(b.address()).unwrap();
    a.wait_peer(peer, LIMIT).unwrap();
    (a, b, peer)
}

fn write(
    engine: &TransferEngine,
    peer: PeerId,
    src: &Region,
    dst: &MrDesc,
    imm: Option<immwire::ImmTag>,
) -> Transfer {
    loop {
        let write = SingleWrite { peer, src, src_offset: 0, dst, dst_offset: 0, len: BYTES, imm };
        if let Ok(transfer) = engine.submit_single_write(&write) {
            return transfer;
        }
        assert!(engine.wait_capacity(LIMIT), "no transfer ends");
    }
}

/// Four threads submit at once, and learn of the ends in each way there is.
#[test]
fn callers_meet_the_engine() {
    let (a, b, peer) = pair();
    let (a, there) = (Arc::new(a), b.alloc(4096).unwrap());
    let counter = Arc::new(b.counter().unwrap());
    let (tag, desc) = (counter.tag(), there.desc());
    let per_caller = rounds() * 8;
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (a, desc) = (Arc::clone(&a), &desc);
            scope.spawn(move || {
                let src = a.alloc(4096).unwrap();
                let (told, ends) = mpsc::channel();
                for round in 0..per_caller {
                    let transfer = write(&a, peer, &src, desc, Some(tag));
                    match (caller + round) % 4 {
                        0 => transfer.wait(LIMIT).unwrap().ok().unwrap(),
                        1 => block_on(transfer, LIMIT).unwrap().ok().unwrap(),
                        2 => {
                            let (told, mine) = (told.clone(), Box::new(round));
                            transfer.on_done(move |end| told.send((end, mine)).unwrap());
                            let (end, mine) = ends.recv_timeout(LIMIT).unwrap();
                            end.ok().unwrap();
                            assert_eq!(*mine, round);
                        }
                        _ => drop(transfer),
                    }
                }
            });
        }
        let counter = &counter;
        scope.spawn(move || {
            let all = CALLERS * per_caller;
            let (told, counts) = mpsc::channel();
            for round in 0..all / 4 {
                match round % 3 {
                    0 => counter.wait(4, LIMIT).unwrap(),
                    1 => block_on(counter.reached(4), LIMIT).unwrap().unwrap(),
                    _ => {
                        let (told, mine) = (told.clone(), Box::new(round));
                        counter.on_count(4, move |got| told.send((got, mine)).unwrap()).unwrap();
                        let (got, mine) = counts.recv_timeout(LIMIT).unwrap();
                        got.unwrap();
                        assert_eq!(*mine, round);
                    }
                }
            }
        });
    });
    assert_eq!(counter.available(), 0);
}

/// Messages from two threads each way; callbacks take them, and a thread does.
#[test]
fn messages_cross() {
    let (a, b, to_b) = pair();
    let messages = rounds() * 4;
    let (told, received) = mpsc::channel();
    b.submit_recvs(usize::try_from(messages).unwrap(), move |message| {
        told.send(message.bytes).unwrap();
    });
    thread::scope(|scope| {
        let (a, b) = (&a, &b);
        scope.spawn(move || {
            for round in 0..messages {
                let sent = a.submit_send(to_b, &round.to_le_bytes()).unwrap();
                sent.wait(LIMIT).unwrap().ok().unwrap();
            }
        });
        scope.spawn(move || {
            let to_a = b.add_peer(a.address()).unwrap();
            b.wait_peer(to_a, LIMIT).unwrap();
            for round in 0..messages {
                let _sent = b.submit_send(to_a, &round.to_le_bytes()).unwrap();
                assert_eq!(a.recv(LIMIT).unwrap().bytes, round.to_le_bytes());
            }
        });
        for round in 0..messages {
            assert_eq!(received.recv_timeout(LIMIT).unwrap(), round.to_le_bytes());
        }
    });
}

/// Engines end while threads submit, wait and hold on to what they have.
#[test]
fn engines_end_under_load() {
    for round in 0..rounds() {
        let (a, b, peer) = pair();
        let region = b.alloc(4096).unwrap();
        let there = region.desc();
        let counter = Arc::new(b.counter().unwrap());
        let tag = counter.tag();
        let called = Arc::new(AtomicU64::new(0));
        let waiter = thread::spawn(move || counter.wait(u64::from(u32::MAX), LIMIT).is_err());
        let writer = {
            let called = Arc::clone(&called);
            thread::spawn(move || {
                let src = a.alloc(4096).unwrap();
                for count in 0..32 {
                    let transfer = write(&a, peer, &src, &there, Some(tag));
                    let (called, mine) = (Arc::clone(&called), Box::new(count));
                    transfer.on_done(move |_| {
                        called.fetch_add(u64::from(*mine < 32), Ordering::Relaxed);
                    });
                    if count == round % 32 {
                        a.remove_peer(peer);
                        break;
                    }
                }
            })
        };
        thread::sleep(Duration::from_micros(round * 37 % 500));
        drop((b, region));
        assert!(waiter.join().unwrap(), "a wait ended without its count");
        writer.join().unwrap();
        assert_eq!(called.load(Ordering::Relaxed), round % 32 + 1, "each end is told once");
    }
}

/// One thread polls, others submit and wait: the engine has no thread of its own.
#[test]
fn callers_meet_a_polled_engine() {
    let (a, mut driver): (TransferEngine, Driver) =
        TransferEngine::builder().build_polled().unwrap();
    let b = engine();
    let (region, counter) = (b.alloc(4096).unwrap(), b.counter().unwrap());
    let there = region.desc();
    let peer = driver.add_peer(b.address()).unwrap();
    driver.wait_peer(peer, LIMIT).unwrap();
    let (a, per_caller, tag) = (Arc::new(a), rounds() * 4, counter.tag());
    thread::scope(|scope| {
        let left = Arc::new(AtomicU64::new(2));
        for _ in 0..2 {
            let (a, left, there) = (Arc::clone(&a), Arc::clone(&left), &there);
            scope.spawn(move || {
                let src = a.alloc(4096).unwrap();
                for _ in 0..per_caller {
                    write(&a, peer, &src, there, Some(tag)).wait(LIMIT).unwrap().ok().unwrap();
                }
                left.fetch_sub(1, Ordering::Release);
            });
        }
        let all_gone = || (left.load(Ordering::Acquire) == 0).then_some(());
        assert_eq!(driver.run_until(LIMIT, all_gone), Some(()));
    });
    counter.wait(2 * per_caller, LIMIT).unwrap();
}

/// The queue that callers and engine meet in, with values that own memory.
#[test]
fn values_cross_a_ring() {
    let mut cells: Vec<Cell<Box<u64>>> = (0..8).map(|_| Cell::new()).collect();
    let ring = Ring::from_slice(&mut cells).unwrap();
    let (values, sum) = (rounds() * 200, AtomicU64::new(0));
    let popped = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for value in 0..values {
                    let mut boxed = Box::new(value);
                    while let Err(back) = ring.try_push(boxed) {
                        boxed = back;
                        thread::yield_now();
                    }
                }
            });
            scope.spawn(|| {
                while popped.load(Ordering::Relaxed) < 2 * values {
                    match ring.try_pop() {
                        Some(value) => {
                            sum.fetch_add(*value, Ordering::Relaxed);
                            popped.fetch_add(1, Ordering::Relaxed);
                        }
                        None => thread::yield_now(),
                    }
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), values * (values - 1));
}
