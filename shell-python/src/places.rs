//! Places of transfers in an engine, and who waits for one.
//!
//! A transfer keeps its place until it has ended and nobody has the engine's handle of it any more. Whoever looks at one that has ended
//! lets go of that; but Python may keep transfers that nobody looks at. So where a place is wanted all are looked at,
//! and while somebody waits for one, each that there is, or that comes, is to tell of its end.
//!
//! # Invariants
//!
//! - What has a place is known here: from when it was submitted until its end is known, or it is dropped.
//! - Who waits is woken by the next end, whenever that transfer came, or finds it: so none that has ended keeps its place.
//! - Under the lock nothing is dropped but names, and nobody is woken.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use crate::sync::lock;
use crate::transfer::Watched;
use crate::waiting::Waiter;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Places(Mutex<State>);

#[derive(Default)]
struct State {
    /// Transfers that have one.
    taken: HashMap<u64, Weak<Watched>>,
    /// Who waits for one.
    waiting: Vec<(u64, Waiter)>,
}

impl State {
    fn all(&self) -> Vec<Arc<Watched>> {
        self.taken.values().filter_map(Weak::upgrade).collect()
    }

    /// Whom this number stands for, to be dropped once the lock is free.
    fn withdraw(&mut self, id: u64) -> Option<Waiter> {
        let at = self.waiting.iter().position(|(waiting, _)| *waiting == id)?;
        Some(self.waiting.swap_remove(at).1)
    }
}

impl Places {
    /// A transfer has got one.
    pub(crate) fn enter(&self, id: u64, transfer: &Arc<Watched>) {
        let is_wanted = {
            let mut state = lock(&self.0);
            state.taken.insert(id, Arc::downgrade(transfer));
            !state.waiting.is_empty()
        };
        if is_wanted {
            transfer.arm_once();
        }
    }

    /// It gives it back.
    pub(crate) fn leave(&self, id: u64) {
        lock(&self.0).taken.remove(&id);
    }

    /// Lets go of those that have ended; returns whether there were any. O(transfers that have a place).
    pub(crate) fn sweep(&self) -> bool {
        let all = lock(&self.0).all();
        let ended = all.iter().filter(|transfer| transfer.poll_end().is_some()).count();
        ended > 0
    }

    /// Has `waiter`, as `id`, woken by the next end. What has ended by now is for who looks after this.
    pub(crate) fn watch(&self, id: u64, waiter: Waiter) {
        let (all, replaced) = {
            let mut state = lock(&self.0);
            let replaced = state.withdraw(id);
            state.waiting.push((id, waiter));
            (state.all(), replaced)
        };
        drop(replaced);
        all.iter().for_each(Watched::arm_once);
    }

    /// Who waited as `id` does so no more.
    pub(crate) fn forget(&self, id: u64) {
        let gone = lock(&self.0).withdraw(id);
        drop(gone);
    }

    /// A transfer has ended: who waits looks again.
    pub(crate) fn tell(&self) {
        let waiting = std::mem::take(&mut lock(&self.0).waiting);
        waiting.iter().for_each(|(_, waiter)| waiter.wake());
    }
}
