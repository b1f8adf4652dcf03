//! Engines under the load of many threads, in one process, so that a sanitizer sees every access.
//!
//! The tests in `tests/` are the load; `check` builds them with ThreadSanitizer and AddressSanitizer.
//! They pass without a sanitizer too, where they say little: what counts is that nothing is reported.
//!
//! Sees what ran, and nothing else: an order that did not come up is not judged. Sees no race on memory
//! that two mappings share, as peers' regions are: it goes by addresses. The models of
//! `verification/loom` are for that.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Wakes by unparking the thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs `future` on this thread, asleep while there is nothing to do; `None` after `limit`.
pub fn block_on<F: Future>(future: F, limit: Duration) -> Option<F::Output> {
    let start = Instant::now();
    let mut future = pin!(future);
    loop {
        // A waker of its own each time, so that replacing one is exercised.
        let waker = Arc::new(Unpark(thread::current())).into();
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(done);
        }
        let left = limit.checked_sub(start.elapsed())?;
        thread::park_timeout(left);
    }
}

/// How often each load is repeated: `IMMWIRE_STRESS`, or a few times.
#[must_use]
pub fn rounds() -> u64 {
    std::env::var("IMMWIRE_STRESS").ok().and_then(|text| text.parse().ok()).unwrap_or(20)
}
