//! GPUs that are stuck: as long as one is, nothing is given back to the driver.
//!
//! Who has waited in vain for what a stream was given says so here. That may use whatever memory its caller named, other GPUs' and the
//! host's too, and goes on using it when the GPU goes on. The driver would know, since it waits for all streams of a context before it
//! frees: but then so would whoever drops something, as long as the GPU takes. So what is dropped meanwhile is kept, for good; host memory
//! stays pinned until somebody is to pin it once more, who has it unpinned first.
//!
//! Seen to wait so, for all of two seconds that a stream waited (one H100, driver 580.159.04): `cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostUnregister`, `cuIpcCloseMemHandle`. Seen not to: whatever takes or maps memory, `cuMemUnmap`, `cuMemAddressFree`,
//! `cuMemRelease`, and the end of events and of other streams. While a thread waits so, launches, copies, allocations, new streams and events recorded by others
//! that use that GPU wait, too; questions about events and streams, waits for these, and words that streams write do not (an H200, the same driver).
//! None of them would while it waits in `cuCtxSynchronize`; but that ends every capture of a graph that is under way (error 901).
//!
//! # What it refuses to know
//!
//! Which memory that is, and how long those calls take where nobody has given up: who cannot wait has another thread make them.
//!
//! # Invariants
//!
//! - From [`give_up`] until the event is done nobody gets a context [to free](to_free) anything in.
//! - It waits for nobody: its lock is held for as long as it takes to ask for an event.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::{Device, Event};
use crate::driver::Current;

/// Recorded behind what was waited for in vain.
static BEHIND: Mutex<Vec<Event>> = Mutex::new(Vec::new());
/// Whether there are any.
static IS_ANY: AtomicBool = AtomicBool::new(false);

fn behind() -> MutexGuard<'static, Vec<Event>> {
    BEHIND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What comes before this event may never end.
pub(crate) fn give_up(event: Event) {
    let mut all = behind();
    all.push(event);
    // Release: it is there for whoever drops something because of this.
    IS_ANY.store(true, Ordering::Release);
}

/// Makes the context current for something to be freed. `None`: it is kept for good.
pub(crate) fn to_free(device: &Device) -> Option<Current> {
    if is_any() { None } else { device.enter().ok() }
}

/// Whether a GPU is stuck. A load, where nobody has given up.
fn is_any() -> bool {
    if !IS_ANY.load(Ordering::Acquire) {
        return false;
    }
    let mut all = behind();
    // In a context that has failed nothing runs.
    let over = |event: &mut Event| !matches!(event.is_done(), Ok(false));
    let over: Vec<Event> = all.extract_if(.., over).collect();
    let is_any = !all.is_empty();
    IS_ANY.store(is_any, Ordering::Release);
    drop(all);
    // Without the lock: with one of them the context may go.
    drop(over);
    is_any
}
