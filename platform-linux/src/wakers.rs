//! Tasks that wait for the same change, whatever it is: a waker of each, until the change comes, or the task gives up.
//!
//! It refuses to know what is waited for, and locks nothing: whoever has it behind the lock of what changes lets no change come
//! between a look and the leaving of a waker.
//!
//! # Invariants
//!
//! A number stands for one waker at most, and for none that was woken or withdrawn.

use std::task::Waker;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    next: u64,
    left: Vec<(u64, Waker)>,
}

impl Wakers {
    /// Leaves a waker, in the place of the one that `id` stands for, if it does, which is returned: to be dropped once no lock is held, as that
    /// may run code of others, and look at once.
    #[must_use]
    pub(crate) fn leave(&mut self, id: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let replaced = self.withdraw(*id);
        self.left.push((self.next, waker.clone()));
        *id = Some(self.next);
        self.next += 1;
        replaced
    }

    /// Takes a waker back, to be dropped once no lock is held; nothing if it was woken.
    #[must_use]
    pub(crate) fn withdraw(&mut self, id: Option<u64>) -> Option<Waker> {
        let at = self.left.iter().position(|(other, _)| Some(*other) == id)?;
        Some(self.left.swap_remove(at).1)
    }

    /// All, to be woken once no lock is held: a waker may look at once.
    pub(crate) fn take(&mut self) -> Vec<(u64, Waker)> {
        std::mem::take(&mut self.left)
    }
}

/// Wakes all of them.
pub(crate) fn wake(wakers: Vec<(u64, Waker)>) {
    wakers.into_iter().for_each(|(_, waker)| waker.wake());
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Rung(AtomicU32);

    impl Wake for Rung {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_is_woken_once_and_none_that_was_taken_back() {
        let (mut wakers, bells) = (Wakers::default(), [(); 3].map(|()| Arc::new(Rung::default())));
        let mut ids = [None; 3];
        for _ in 0..2 {
            for (id, bell) in ids.iter_mut().zip(&bells) {
                drop(wakers.leave(id, &Waker::from(Arc::clone(bell))));
            }
        }
        assert!(
            wakers
                .withdraw(ids[1])
                .is_some_and(|it| it.will_wake(&Waker::from(Arc::clone(&bells[1]))))
        );
        assert!(wakers.withdraw(ids[1]).is_none() && wakers.withdraw(None).is_none());
        wake(wakers.take());
        wake(wakers.take());
        assert!(wakers.withdraw(ids[0]).is_none());
        assert_eq!(bells.map(|bell| bell.0.load(Ordering::Relaxed)), [1, 0, 1]);
    }
}
