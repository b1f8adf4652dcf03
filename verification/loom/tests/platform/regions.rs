//! Registrations: looked up, dropped, closed and withdrawn at the same time.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex as Notes};
use std::time::Duration;

use immwire_core::id::{EngineId, PeerId};
use immwire_core::region::{Keys, LocalMr, MrDesc, Rights};
use immwire_verification_loom::{Bound, clause, explore, thread};

use crate::provider::{Memory, Place, RegisterError, Registered, RevokeError};
use crate::region::{CloseError, Region, Registry};

/// A registrar that keeps a record. It is no part of the model: nothing is ordered by it.
#[derive(Default)]
struct Book(Notes<Record>);

#[derive(Default)]
struct Record {
    registered: u32,
    revoked: Vec<u32>,
    released: Vec<u32>,
    /// Peers write to these, and cannot be stopped.
    written_to: Vec<u32>,
}

impl Memory for Book {
    fn alloc(&self, _bytes: usize) -> Result<Registered, RegisterError> {
        Err(RegisterError::Empty)
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        let mut record = self.0.lock().unwrap();
        record.registered += 1;
        let (generation, keys) = (record.registered, Keys::new(&[0]).unwrap());
        let (base, bytes) = (ptr.addr().get() as u64, len as u64);
        let desc = MrDesc { owner: EngineId(1), base, len: bytes, generation, rights, keys };
        let local = LocalMr { base, len: bytes, generation, keys };
        Ok(Registered { ptr, len, local, desc, id: generation, place: Place::Host })
    }

    fn revoke(&self, region: &Registered, _patience: Duration) -> Result<(), RevokeError> {
        let mut record = self.0.lock().unwrap();
        if record.written_to.contains(&region.id) {
            return Err(RevokeError { peer: PeerId { index: 0, generation: 0 } });
        }
        record.revoked.push(region.id);
        Ok(())
    }

    fn release(&self, region: Registered) {
        let mut record = self.0.lock().unwrap();
        assert!(record.revoked.contains(&region.id), "released before it was withdrawn");
        assert!(!record.released.contains(&region.id), "released twice");
        record.released.push(region.id);
    }
}

impl Book {
    fn is_revoked(&self, region: &Region) -> bool {
        self.0.lock().unwrap().revoked.contains(&region.desc().generation)
    }

    /// Every registration has been released, once.
    fn all_released(&self) -> bool {
        let record = self.0.lock().unwrap();
        record.released.len() == record.registered as usize
    }
}

fn registry() -> (Arc<Book>, Arc<Registry>) {
    let book = Arc::new(Book::default());
    (Arc::clone(&book), Registry::new(book))
}

/// Nothing follows the address.
fn register(registry: &Arc<Registry>, base: usize, len: usize) -> Region {
    let ptr = NonNull::new(std::ptr::without_provenance_mut(base)).unwrap();
    // SAFETY: the registrar hands the range to no peer, and the models do not follow it.
    unsafe { registry.register(ptr, len, Rights::REMOTE_WRITE) }.unwrap()
}

/// The last handle of a registration is dropped while a range inside it is looked up.
///
/// *Fails if* the look-up takes a registration that is going, or a registration goes whose handle was
/// just taken (it is withdrawn while held), or if one is never released.
#[test]
fn a_look_up_takes_hold_or_finds_nothing() {
    explore(clause::ENDS, Bound::None, 27, || {
        let (book, registry) = registry();
        let whole = register(&registry, 1000, 100);
        let dropping = thread::spawn(move || drop(whole));
        let part = register(&registry, 1010, 10);
        assert!(!book.is_revoked(&part), "withdrawn while held");
        dropping.join().unwrap();
        assert!(!book.is_revoked(&part), "withdrawn while held");
        drop(part);
        assert!(book.all_released());
    });
}

/// The same with a handle that is closed: only the last one can be.
///
/// *Fails if* whether it is the last is looked at before, and not with, its taking.
#[test]
fn a_region_is_closed_by_its_last_handle_only() {
    explore(clause::ENDS, Bound::None, 27, || {
        let (book, registry) = registry();
        let whole = register(&registry, 1000, 100);
        let closing = thread::spawn(move || whole.close(Duration::ZERO));
        let part = register(&registry, 1010, 10);
        assert!(!book.is_revoked(&part), "withdrawn while held");
        match closing.join().unwrap() {
            Ok(()) => assert_eq!(part.desc().generation, 2),
            Err(CloseError::InUse { region }) => {
                assert_eq!(region.desc().generation, part.desc().generation);
            }
            Err(other) => panic!("{other}"),
        }
        assert!(!book.is_revoked(&part), "withdrawn while held");
        drop(part);
        assert!(book.all_released());
    });
}

/// Two threads hold handles of one registration and drop them.
///
/// *Fails if* both or neither release it, or if the release does not come after the other's use of it.
#[test]
fn two_handles_release_their_registration_once() {
    explore(clause::ENDS, Bound::None, 4, || {
        let (book, registry) = registry();
        let whole = register(&registry, 1000, 100);
        let part = register(&registry, 1010, 10);
        let dropping = thread::spawn(move || drop(part));
        assert!(!book.is_revoked(&whole));
        drop(whole);
        dropping.join().unwrap();
        assert!(book.all_released());
        assert!(!book.is_revoked(&register(&registry, 1010, 10)), "a dead registration was found");
    });
}

/// A region is dropped while a peer writes to it, and the driver sweeps; later the peer has stopped.
///
/// *Fails if* a sweep that takes the list loses what is added meanwhile, or what it cannot withdraw yet.
#[test]
fn what_is_dropped_too_early_is_released_by_a_later_sweep() {
    explore(clause::ENDS, Bound::None, 4, || {
        let (book, registry) = registry();
        let regions = [register(&registry, 1000, 10), register(&registry, 2000, 10)];
        book.0.lock().unwrap().written_to = vec![1, 2];
        let [first, second] = regions;
        drop(first);
        let dropping = thread::spawn(move || drop(second));
        registry.sweep();
        dropping.join().unwrap();
        assert!(book.0.lock().unwrap().revoked.is_empty());
        book.0.lock().unwrap().written_to.clear();
        registry.sweep();
        assert!(book.all_released());
    });
}

/// The engine ends while a region is dropped, and another is closed in vain.
///
/// *Fails if* the end does not withdraw what handles still hold, or releases it under them.
#[test]
fn the_end_withdraws_what_is_held_and_releases_what_is_not() {
    explore(clause::ENDS, Bound::None, 18, || {
        let (book, registry) = registry();
        let (kept, dropped) = (register(&registry, 1000, 10), register(&registry, 2000, 10));
        let dropping = thread::spawn(move || drop(dropped));
        assert_eq!(registry.withdraw_all(Duration::ZERO, || ()), 0);
        dropping.join().unwrap();
        assert!(book.is_revoked(&kept), "left to peers");
        assert_eq!(book.0.lock().unwrap().released, [2], "released while held, or never");
        drop(kept);
        assert!(book.all_released());
    });
}
