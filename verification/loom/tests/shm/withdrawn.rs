//! Withdrawn grants: whoever holds a mapping gives each of them back, asleep or not.

use immwire_core::hazard::may_continue;
use immwire_core::wake::Doorbell;
use immwire_verification_loom::{Bound, clause, explore, me, thread};
use loom::sync::Arc;

use crate::sync::AtomicU64;
use crate::withdrawals::{Seen, withdraw};

const KEYS: [u64; 2] = [7, 8];

struct Shared {
    grants: [AtomicU64; 2],
    count: AtomicU64,
    bell: Doorbell,
}

/// Two regions are withdrawn while the writer looks, gives back what it sees, and sleeps.
///
/// *Fails if* the count comes before its grant, or is taken `Relaxed` (the writer acts on a count and keeps the
/// mapping), or if it does not look before it sleeps (nobody wakes it).
#[test]
fn every_withdrawn_region_is_given_back() {
    explore(clause::ENDS, Bound::Preemptions(3), 800, || {
        let shared = Arc::new(Shared {
            grants: KEYS.map(AtomicU64::new),
            count: AtomicU64::new(0),
            bell: Doorbell::new(),
        });
        let owner = {
            let (shared, writer) = (shared.clone(), me());
            thread::spawn(move || {
                for grant in &shared.grants {
                    withdraw(grant, &shared.count);
                    if shared.bell.ring() {
                        writer.unpark();
                    }
                }
            })
        };
        let (mut seen, mut mapped) = (Seen::default(), [true; 2]);
        while mapped != [false; 2] {
            if seen.take(&shared.count) {
                for ((mapped, grant), key) in mapped.iter_mut().zip(&shared.grants).zip(KEYS) {
                    *mapped &= may_continue(grant, key);
                }
                continue;
            }
            shared.bell.prepare_sleep();
            if !seen.is_news(&shared.count) {
                thread::park();
            }
            shared.bell.awake();
        }
        owner.join().unwrap();
    });
}
