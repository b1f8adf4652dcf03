//! How memory is taken back from a writer that is never asked: one hazard word against one grant word.
//!
//! A peer that maps a region writes to it without calling its owner, so the owner cannot wait for a
//! call to end. Two words, in memory both share, stand in for it. `grant` is the owner's: the key of
//! the region while the peer may write, [`NO_KEY`] after. `active` is the writer's: the key of the
//! region it is writing to now, [`NO_KEY`] between writes. Each side writes its word, fences, and
//! reads the other's:
//!
//! ```text
//!   writer                            owner
//!   enter:  active = key              withdraw:  grant = NO_KEY
//!           fence                                fence
//!           grant == key ?            quiet:     active != key ?
//!           write ...
//!   leave:  active = NO_KEY
//! ```
//!
//! # Invariants
//!
//! - Once [`withdraw`] has returned and [`quiet`] has been true once, no write under that key is under
//!   way, none starts, and every one that ended is visible to the caller. Of the two fences one comes
//!   first. If it is the writer's, the owner reads `active == key` until [`leave`]; if it is the
//!   owner's, the writer reads a withdrawn grant and does not write. The model in `verification/`
//!   checks it; it fails if either fence, or the release in [`leave`] or [`enter`], is weakened.
//! - The words may lie in memory that a hostile process scribbles on: any value of either is only
//!   compared. What such a process does with a mapping it was given is beyond this module.
//!
//! One writer a word: a process with two writing threads needs two `active` words.

use crate::sync::{AtomicU64, Ordering, fence};

/// The key of no region: nothing is granted, nobody writes. A region's key is never this.
pub const NO_KEY: u64 = 0;

/// Announces that the caller is about to write under `key`, and returns whether it may.
///
/// `false`: it may not, and nothing is announced any more. `true`: it may until [`leave`], or until the
/// next `enter` on this word. Costs a full fence; a caller with several writes under one key enters
/// once and asks [`may_continue`] before each further one.
#[must_use = "writing without the right is what this module is to prevent"]
pub fn enter(active: &AtomicU64, grant: &AtomicU64, key: u64) -> bool {
    // Release: a caller that comes from another key ends its writes under that one here.
    active.store(key, Ordering::Release);
    fence(Ordering::SeqCst);
    let granted = may_continue(grant, key);
    if !granted {
        leave(active);
    }
    granted
}

/// Whether a caller that has entered under `key` may start another write. A load.
#[must_use]
pub fn may_continue(grant: &AtomicU64, key: u64) -> bool {
    // Acquire: the writer's bytes come after what the owner did before it granted.
    key != NO_KEY && grant.load(Ordering::Acquire) == key
}

/// Ends the writing: everything written since [`enter`] is visible to whoever sees it ended.
pub fn leave(active: &AtomicU64) {
    active.store(NO_KEY, Ordering::Release);
}

/// Allows writes under `key`. What the caller did to the region before is visible to the writer.
pub fn grant(grant: &AtomicU64, key: u64) {
    grant.store(key, Ordering::Release);
}

/// Withdraws the grant; writes may still be under way until [`quiet`]. Costs a full fence.
pub fn withdraw(grant: &AtomicU64) {
    grant.store(NO_KEY, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Whether no write under `key` is under way. Once `true` after [`withdraw`], none ever will be; but whoever tries, and is told that it may
/// not, announces itself for a moment: asked again, this may be `false`.
#[must_use]
pub fn quiet(active: &AtomicU64, key: u64) -> bool {
    active.load(Ordering::Acquire) != key
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawn_grant_stops_the_next_write_and_shows_the_one_under_way() {
        let (active, word) = (AtomicU64::new(NO_KEY), AtomicU64::new(NO_KEY));
        assert!(!enter(&active, &word, 7));
        assert!(quiet(&active, 7));
        grant(&word, 7);
        assert!(!enter(&active, &word, 8));
        assert!(enter(&active, &word, 7));
        withdraw(&word);
        assert!(!quiet(&active, 7) && quiet(&active, 8));
        assert!(!may_continue(&word, 7));
        leave(&active);
        assert!(quiet(&active, 7));
        assert!(!enter(&active, &word, 7));
    }

    #[test]
    fn no_key_is_never_granted() {
        let (active, word) = (AtomicU64::new(NO_KEY), AtomicU64::new(NO_KEY));
        assert!(!enter(&active, &word, NO_KEY));
    }
}
