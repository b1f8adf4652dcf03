//! The twin of the platform's `sync`: the same names, on loom's locks and atomics.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use immwire_core::wake::WakeWord;
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicUsize;

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use loom::thread::yield_now;

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

pub(crate) fn sleep_locked<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    left: Duration,
) -> MutexGuard<'a, T> {
    assert_eq!(left, Duration::MAX, "only who has time without end sleeps");
    condvar.wait(guard).unwrap()
}

/// A thread that parks. Not loom's own: that forgets an `unpark` which finds its thread yielding, and
/// takes one that finds it blocked elsewhere, by a lock or a join, for what it waits for there.
#[derive(Clone)]
pub(crate) struct Thread(Arc<(Mutex<bool>, Condvar)>);

loom::thread_local! {
    static CURRENT: Thread = Thread(Arc::new((Mutex::new(false), Condvar::new())));
}

pub(crate) fn current() -> Thread {
    CURRENT.with(Thread::clone)
}

pub(crate) fn park() {
    let Thread(me) = current();
    let mut token = me.0.lock().unwrap();
    while !*token {
        token = me.1.wait(token).unwrap();
    }
    *token = false;
}

/// Which thread it is: where its token lies.
pub(crate) type ThreadId = usize;

impl Thread {
    pub(crate) fn id(&self) -> ThreadId {
        Arc::as_ptr(&self.0).addr()
    }

    pub(crate) fn unpark(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

loom::lazy_static! {
    /// The kernel's: it compares the word, and puts the caller to sleep, under the lock that a waker
    /// takes. One queue for all words: whoever is woken for another's looks again.
    static ref FUTEX: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
}

pub(crate) fn sleep_on(word: &WakeWord, seen: u32, left: Duration) {
    assert_eq!(left, Duration::MAX, "only who has time without end sleeps");
    let guard = FUTEX.0.lock().unwrap();
    if word.load(Ordering::Relaxed) == seen {
        drop(FUTEX.1.wait(guard).unwrap());
    }
}

pub(crate) fn wake_all(_word: &WakeWord) {
    drop(FUTEX.0.lock().unwrap());
    FUTEX.1.notify_all();
}

/// Time without end, or none at all.
pub(crate) struct Timer {
    limit: Duration,
}

impl Timer {
    pub(crate) fn start(limit: Duration) -> Self {
        assert!(limit == Duration::MAX || limit == Duration::ZERO, "a model has no clock");
        Self { limit }
    }

    pub(crate) fn left(&self) -> Option<Duration> {
        (self.limit == Duration::MAX).then_some(self.limit)
    }

    /// Looks once: looking twice in a row shows a model nothing new.
    pub(crate) fn spin<R>(&self, look: impl Fn() -> Option<R>) -> Option<R> {
        look()
    }
}

/// Set once, read by all. As std promises: whoever reads it sees what came before it was set.
pub(crate) struct OnceLock<T> {
    is_set: AtomicBool,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: loom checks every access to the value, and fails the model if two race.
unsafe impl<T: Send + Sync> Sync for OnceLock<T> {}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self { is_set: AtomicBool::new(false), value: UnsafeCell::new(None) }
    }

    /// By one thread.
    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        // SAFETY: nobody reads before the flag is set.
        self.value.with_mut(|place| unsafe { *place = Some(value) });
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn get(&self) -> Option<&T> {
        if !self.is_set.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: it was set before the flag, and does not change.
        self.value.with(|place| unsafe { (*place).as_ref() })
    }
}

/// What std documents of `Arc`, with loom's atomics: the value is dropped by whoever drops the last
/// count, after all else that was done with it, and cannot be reached again.
pub(crate) struct Counted<T>(Arc<Inner<T>>);

/// `Weak`: its own count only keeps the place, and is left to std.
pub(crate) struct Uncounted<T>(Arc<Inner<T>>);

struct Inner<T> {
    strong: AtomicUsize,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: loom checks every access to the value, and fails the model if two race.
unsafe impl<T: Send + Sync> Sync for Inner<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Inner<T> {}

impl<T> Counted<T> {
    pub(crate) fn new(value: T) -> Self {
        let (strong, value) = (AtomicUsize::new(1), UnsafeCell::new(Some(value)));
        Self(Arc::new(Inner { strong, value }))
    }

    pub(crate) fn try_unwrap(this: Self) -> Result<T, Self> {
        let taken = this.0.strong.compare_exchange(1, 0, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_err() {
            return Err(this);
        }
        fence(Ordering::Acquire);
        let value = this.0.take();
        // Its count is gone already.
        let inner = Uncounted(Arc::clone(&this.0));
        std::mem::forget(this);
        // SAFETY: `forget` left one count of the std `Arc` behind, which is given back here.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(&inner.0)) };
        Ok(value)
    }

    pub(crate) fn downgrade(this: &Self) -> Uncounted<T> {
        Uncounted(Arc::clone(&this.0))
    }
}

impl<T> Inner<T> {
    fn take(&self) -> T {
        // SAFETY: the last count is gone, so that nobody else reaches the value; loom checks.
        self.value.with_mut(|value| unsafe { (*value).take() }).unwrap()
    }
}

impl<T> Uncounted<T> {
    pub(crate) fn upgrade(&self) -> Option<Counted<T>> {
        let mut strong = self.0.strong.load(Ordering::Relaxed);
        while strong > 0 {
            let more = strong + 1;
            match self.0.strong.compare_exchange(strong, more, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(Counted(Arc::clone(&self.0))),
                Err(seen) => strong = seen,
            }
        }
        None
    }

    pub(crate) fn strong_count(&self) -> usize {
        self.0.strong.load(Ordering::Relaxed)
    }
}

impl<T> Clone for Counted<T> {
    fn clone(&self) -> Self {
        self.0.strong.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl<T> Deref for Counted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: while this count is held the value is there, and nobody writes to it.
        self.0.value.with(|value| unsafe { (*value).as_ref() }).unwrap()
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        if self.0.strong.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            drop(self.0.take());
        }
    }
}
