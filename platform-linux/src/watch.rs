//! Words that GPUs store to, and a thread that calls back when one has changed: how a kernel, inside of a CUDA graph too,
//! tells the CPU how far it is.
//!
//! The words lie in pinned host memory. A thread looks at those that are watched without pause, and takes a
//! processor for it, as long as there are any; without, it sleeps. What changes several times between two looks is told once.
//!
//! # What it refuses to know
//!
//! What the numbers mean; when a callback may be called (`immwire_core::watch`).
//!
//! # Invariants
//!
//! - A word is given to another watcher when its last call has returned, and is zero then.
//! - Callbacks, which are the caller's code, run and are dropped without the lock.
//! - Nobody waits for a callback, but whoever ends the engine, on another thread.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use immwire_core::watch::Watched;

use crate::provider::{PinnedPage, RegisterError};
use crate::thread;
use crate::words::Word;

type Callback = Box<dyn Fn(u64, u64) + Send + Sync>;

/// A word that is watched.
struct Entry {
    word: Word,
    watched: Watched,
    /// What was told last. The watching thread's.
    last: AtomicU64,
    callback: Callback,
}

impl Entry {
    /// Calls back if the word has changed. Returns whether that was the last call.
    fn look(&self) -> bool {
        let (last, now) = (self.last.load(Ordering::Relaxed), self.word.get());
        if last == now || !self.watched.begin() {
            return false;
        }
        self.last.store(now, Ordering::Relaxed);
        if catch_unwind(AssertUnwindSafe(|| (self.callback)(last, now))).is_err() {
            tracing::error!("the callback of a watched word panicked");
        }
        self.watched.end()
    }
}

#[derive(Default)]
struct Table {
    entries: Vec<Arc<Entry>>,
    free: Vec<Word>,
    thread: Option<JoinHandle<()>>,
    /// The engine has ended.
    is_stopped: bool,
}

/// The watched words of an engine.
#[derive(Default)]
pub(crate) struct Watch {
    table: Mutex<Table>,
    changed: Condvar,
    /// How often the table has changed.
    version: AtomicU64,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // No callback runs with the lock: the table is whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look at the table, which is locked.
    fn tell(&self) {
        self.version.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    /// Watches a word, in a page that `pin` makes if there is no word left.
    pub(crate) fn add(
        self: &Arc<Self>,
        pin: impl FnOnce(usize) -> Result<PinnedPage, RegisterError>,
        callback: Callback,
    ) -> Result<UvmWatcher, RegisterError> {
        let mut table = self.lock();
        if table.free.is_empty() {
            table.free.extend(Word::page(pin)?);
        }
        if table.thread.is_none() {
            let watch = Arc::clone(self);
            let os = |source| RegisterError::Os { call: "starting a thread", bytes: 0, source };
            let serve = move || watch.serve();
            table.thread = Some(thread::spawn("immwire-watch", serve).map_err(os)?);
        }
        // PROOF: there was one, or there are 512 new ones.
        let Some(word) = table.free.pop() else { return Err(RegisterError::Empty) };
        let (watched, last) = (Watched::new(), AtomicU64::new(0));
        let entry = Arc::new(Entry { word, watched, last, callback });
        table.entries.push(Arc::clone(&entry));
        self.tell();
        drop(table);
        Ok(UvmWatcher { entry, watch: Arc::clone(self) })
    }

    /// Nothing of the entry is used any more: its word is another's to have.
    fn recycle(&self, entry: &Entry) {
        entry.word.set(0);
        self.lock().free.push(entry.word.clone());
    }

    fn serve(&self) {
        let mut entries: Vec<Arc<Entry>> = Vec::new();
        let mut seen = 0;
        loop {
            if self.version.load(Ordering::Acquire) != seen {
                // Dropped without the lock: callbacks may go with them.
                entries.clear();
                let mut table = self.lock();
                while table.entries.is_empty() && !table.is_stopped {
                    let waited = self.changed.wait(table);
                    table = waited.unwrap_or_else(PoisonError::into_inner);
                }
                if table.is_stopped {
                    return;
                }
                seen = self.version.load(Ordering::Acquire);
                entries.extend(table.entries.iter().cloned());
            }
            for entry in &entries {
                if entry.look() {
                    self.recycle(entry);
                }
            }
            std::hint::spin_loop();
        }
    }

    /// No callback is called any more. Waits for one that runs, unless it is the one that calls this.
    pub(crate) fn stop(&self) {
        let mut table = self.lock();
        table.is_stopped = true;
        let (thread, entries) = (table.thread.take(), std::mem::take(&mut table.entries));
        self.tell();
        drop(table);
        // Where a callback ends the engine, those behind it in the same turn are not called any more.
        for entry in &entries {
            // No matter who is last: their words stay what they are, and are nobody else's.
            let _ = entry.watched.stop();
        }
        let thread = thread.filter(|it| it.thread().id() != std::thread::current().id());
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the watching thread panicked");
        }
        drop(entries);
    }
}

/// A word that GPUs store to. While there is this handle, and the engine, a callback is told of its changes.
///
/// Dropping it ends that: no call begins afterwards. One that is under way is not waited for, so a callback may drop its
/// own watcher. What stores to the word must have ended before: the word is given to others.
pub struct UvmWatcher {
    entry: Arc<Entry>,
    watch: Arc<Watch>,
}

impl UvmWatcher {
    /// Where the word is, for GPUs and for the CPU; a multiple of 8.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.entry.word.address()
    }

    /// What it is now. Zero at first.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.entry.word.get()
    }
}

impl fmt::Debug for UvmWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UvmWatcher")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("value", &self.value())
            .finish()
    }
}

impl Drop for UvmWatcher {
    fn drop(&mut self) {
        let is_last = self.entry.watched.stop();
        let mut table = self.watch.lock();
        table.entries.retain(|other| !Arc::ptr_eq(other, &self.entry));
        self.watch.tell();
        drop(table);
        if is_last {
            self.watch.recycle(&self.entry);
        }
    }
}
