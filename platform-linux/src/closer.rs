//! A thread that gives back to a GPU's driver what the driver takes back only when the GPU is idle.
//!
//! `cuIpcCloseMemHandle`, `cuMemHostUnregister`, `cuMemFree` and `cuMemFreeHost` wait for all that the GPU was given by anybody in the
//! process (`immwire_cuda::stuck`): the application's kernels, too, which may take seconds, or for ever. The thread of an engine has
//! peers that wait for it, so such things are dropped here, one after the other.
//!
//! # What it refuses to know
//!
//! What they are, and who waits for them to be gone: their `Drop` says so, to whom it concerns.
//!
//! # Limits
//!
//! While a call of the driver's waits so, those of the process's other threads that use the same GPU wait, too. So it is known of each GPU
//! whether anything is being given back, by whichever closer of the process: who cannot wait asks for that first ([`Closer::is_busy`]). GPUs are told
//! apart by their numbers modulo 64.
//!
//! # Invariants
//!
//! - What is given is dropped once, in the order in which it was given; by who gives it, if there is no thread to be had.
//! - There is a thread from the first thing that is given on, until [`Closer::end`], which joins it. Where that waits in vain, the driver does
//!   not come back: then the thread goes on by itself, with what it has and what it is given later, and nobody waits for it again.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::sync::lock;
use crate::thread;

/// Something that is dropped by another thread.
type Remains = Box<dyn Send>;

/// GPUs that are told apart.
const TOLD_APART: u32 = u64::BITS;

/// How much was given in this process that is not dropped yet: by the number of the GPU, and in all.
static PENDING: [AtomicUsize; TOLD_APART as usize] =
    [const { AtomicUsize::new(0) }; TOLD_APART as usize];
static ALL_PENDING: AtomicUsize = AtomicUsize::new(0);

/// See the module.
pub(crate) struct Closer {
    state: Mutex<State>,
    /// A bit for each GPU whose things it is given.
    gpus: u64,
}

/// What is pending at GPUs of which there is a bit for each.
fn pending_at(gpus: u64) -> impl Iterator<Item = &'static AtomicUsize> {
    PENDING.iter().enumerate().filter_map(move |(at, count)| (gpus >> at & 1 == 1).then_some(count))
}

/// Counts as long as it is not dropped; the last of what is given.
struct Counted(u64);

/// While it is there, whoever uses the GPU knows that the driver may keep callers waiting: for a thread that makes such a call itself.
pub(crate) struct Closing {
    _counted: Counted,
}

impl Closing {
    /// Of the GPU with this number in this process.
    pub(crate) fn of(ordinal: u32) -> Self {
        Self { _counted: Counted::new(1 << (ordinal % TOLD_APART)) }
    }
}

impl Counted {
    fn new(gpus: u64) -> Self {
        for count in pending_at(gpus).chain([&ALL_PENDING]) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Self(gpus)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Release: who sees that nothing is pending does so after all that the driver was asked for.
        for count in pending_at(self.0).chain([&ALL_PENDING]) {
            count.fetch_sub(1, Ordering::Release);
        }
    }
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    Running {
        given: Sender<Remains>,
        thread: JoinHandle<()>,
    },
    /// It was waited for in vain.
    Late {
        given: Sender<Remains>,
    },
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Closer")
    }
}

impl State {
    fn start() -> Self {
        let (given, take) = mpsc::channel::<Remains>();
        let work = move || take.into_iter().for_each(drop);
        match thread::spawn("immwire-closer", work) {
            Ok(thread) => Self::Running { given, thread },
            Err(error) => {
                tracing::warn!(%error, "no thread to give memory back to a driver on");
                Self::Idle
            }
        }
    }
}

impl Closer {
    /// For what is of these GPUs, by their numbers in this process.
    pub(crate) fn new(ordinals: &[u32]) -> Self {
        let gpus = ordinals.iter().fold(0, |gpus, ordinal| gpus | 1 << (ordinal % TOLD_APART));
        Self { state: Mutex::default(), gpus }
    }

    /// Whether something of its GPUs is being dropped, or waits for that, here or by another closer of this process: the driver may keep
    /// whoever calls it waiting. A load, if there is nothing of any.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        ALL_PENDING.load(Ordering::Acquire) > 0
            && pending_at(self.gpus).any(|count| count.load(Ordering::Acquire) > 0)
    }

    /// The same of one GPU alone.
    pub(crate) fn is_busy_at(ordinal: u32) -> bool {
        pending_at(1 << (ordinal % TOLD_APART)).any(|count| count.load(Ordering::Acquire) > 0)
    }

    /// Drops `remains`, on the thread. Allocates; waits for nothing.
    pub(crate) fn give(&self, remains: impl Send + 'static) {
        let remains = (remains, Counted::new(self.gpus));
        let mut state = lock(&self.state);
        if matches!(*state, State::Idle) {
            *state = State::start();
        }
        let unsent: Option<Remains> = match &*state {
            State::Running { given, .. } | State::Late { given } => {
                given.send(Box::new(remains)).err().map(|back| back.0)
            }
            State::Idle => Some(Box::new(remains)),
        };
        drop(state);
        drop(unsent);
    }

    /// Drops `remains`, on the thread, and waits for that: however long the driver takes.
    pub(crate) fn give_and_wait(&self, remains: impl Send + 'static) {
        let (last, over) = mpsc::channel::<()>();
        self.give((remains, last));
        // It never says anything: it ends.
        let _ = over.recv();
    }

    /// Waits until what has been given by now is dropped, for `limit` at most.
    pub(crate) fn catch_up(&self, limit: Duration) {
        let (last, over) = mpsc::channel::<()>();
        self.give(last);
        let _ = over.recv_timeout(limit);
    }

    /// Waits until all that was given is dropped, for `limit` at most, and ends the thread. `false`: the driver has not come back by then.
    pub(crate) fn end(&self, limit: Duration) -> bool {
        let (given, thread) = {
            let mut state = lock(&self.state);
            match std::mem::take(&mut *state) {
                State::Idle => return true,
                late @ State::Late { .. } => {
                    *state = late;
                    return false;
                }
                State::Running { given, thread } => (given, thread),
            }
        };
        // Without the lock: what is dropped may itself give something, to a thread of its own then.
        // Closed when all before it is dropped; or, if something panicked as it was dropped, which has been said, with the thread.
        let (last, over) = mpsc::channel::<()>();
        let _ = given.send(Box::new(last));
        if over.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            let mut state = lock(&self.state);
            if matches!(*state, State::Idle) {
                *state = State::Late { given };
            }
            return false;
        }
        drop(given);
        let _ = thread.join();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Condvar};
    use std::thread::ThreadId;

    #[derive(Default)]
    struct Notes {
        /// What was dropped, and by whom.
        all: Mutex<Vec<(u32, ThreadId)>>,
        may: Mutex<bool>,
        changed: Condvar,
    }

    impl Notes {
        fn allow(&self) {
            *lock(&self.may) = true;
            self.changed.notify_all();
        }
    }

    /// Notes that it was dropped, once it may be.
    struct Noted(u32, Arc<Notes>);

    impl Drop for Noted {
        fn drop(&mut self) {
            drop(self.1.changed.wait_while(lock(&self.1.may), |may| !*may));
            lock(&self.1.all).push((self.0, std::thread::current().id()));
        }
    }

    #[test]
    fn all_is_dropped_in_order_by_one_other_thread_which_is_joined() {
        let noted = Arc::<Notes>::default();
        noted.allow();
        let closer = Closer::new(&[0, 1]);
        assert!(closer.end(Duration::ZERO), "there was no thread");
        (0..9).for_each(|n| closer.give(Noted(n, Arc::clone(&noted))));
        closer.catch_up(Duration::from_secs(60));
        assert_eq!(lock(&noted.all).len(), 9);
        assert!(closer.end(Duration::from_secs(60)));
        let here = std::thread::current().id();
        let first: Vec<_> = lock(&noted.all).clone();
        assert_eq!(first.iter().map(|one| one.0).collect::<Vec<_>>(), Vec::from_iter(0..9));
        assert!(first.iter().all(|one| one.1 == first[0].1 && one.1 != here));
        closer.give(Noted(9, Arc::clone(&noted)));
        assert!(closer.end(Duration::from_secs(60)) && !closer.is_busy());
        assert_eq!(lock(&noted.all).last().map(|one| one.0), Some(9), "after an end, too");
        closer.give_and_wait(Noted(10, Arc::clone(&noted)));
        let last = lock(&noted.all).last().copied();
        assert!(last.is_some_and(|(n, thread)| n == 10 && thread != here), "{last:?}");
        assert!(closer.end(Duration::from_secs(60)));
    }

    #[test]
    fn one_that_does_not_come_back_holds_up_nobody_for_longer_than_they_want() {
        let noted = Arc::<Notes>::default();
        let closer = Closer::new(&[2]);
        (0..2).for_each(|n| closer.give(Noted(n, Arc::clone(&noted))));
        assert!(!closer.end(Duration::from_millis(1)));
        assert!(matches!(*lock(&closer.state), State::Late { .. }));
        closer.give(Noted(2, Arc::clone(&noted)));
        closer.catch_up(Duration::from_millis(1));
        assert!(closer.is_busy());
        assert!(!closer.end(Duration::from_secs(600)), "nobody waits for it again");
        drop(closer);
        assert!(lock(&noted.all).is_empty());
        noted.allow();
        while lock(&noted.all).len() < 3 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_uses_a_gpu_that_another_gives_back_to_knows() {
        let noted = Arc::<Notes>::default();
        let closers = [&[3][..], &[4, 5], &[5, 6 + TOLD_APART], &[6]].map(Closer::new);
        let busy = || closers.each_ref().map(Closer::is_busy);
        assert_eq!(busy(), [false; 4]);
        let check = |giver: usize, expected: [bool; 4]| {
            *lock(&noted.may) = false;
            closers[giver].give(Noted(0, Arc::clone(&noted)));
            assert_eq!(busy(), expected);
            noted.allow();
            while busy() != [false; 4] {
                std::thread::yield_now();
            }
        };
        check(0, [true, false, false, false]);
        check(1, [false, true, true, false]);
        check(2, [false, true, true, true]);
        check(3, [false, false, true, true]);
        // Whoever waits for the driver without a closer is as many's concern.
        for (ordinal, expected) in
            [(4, [false, true, false, false]), (6, [false, false, true, true])]
        {
            let closing = Closing::of(ordinal);
            assert_eq!(busy(), expected);
            drop(closing);
            assert_eq!(busy(), [false; 4]);
        }
        assert!(!Closer::new(&[]).is_busy());
        assert!(closers.iter().all(|closer| closer.end(Duration::from_secs(60))));
    }
}
