//! What a message of a peer takes of memory while it is read: an allocator counts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use immwire_cli::push::message::{FromReceiver, FromSender};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to `System` as it is; what is counted beside it touches no memory of callers.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `at` came from `alloc` above, so from `System`, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The most bytes that `read` had at a time beyond those that were there.
fn most(read: impl FnOnce()) -> usize {
    let before = NOW.load(Relaxed);
    MOST.store(before, Relaxed);
    read();
    MOST.load(Relaxed) - before
}

/// One test: others would allocate meanwhile.
#[test]
fn a_message_takes_no_more_memory_than_it_is_long() {
    const LIST: usize = 1 << 18;
    let zeros = vec!["0"; LIST].join(",");
    let kept = most(|| drop(serde_json::from_str::<serde_json::Value>(&format!("[{zeros}]"))));
    assert!(kept > 8 * LIST, "it is not counted: {kept}");
    for field in ["more", "version", "keep", "slot_tags", "region"] {
        for list in [format!("[{zeros}]"), format!("[[{zeros}]]"), format!("{{\"x\":[{zeros}]}}")] {
            for say in ["working", "offer", "accept"] {
                let tag_last = format!("{{\"{field}\":{list},\"say\":\"{say}\"}}");
                let tag_first = format!("{{\"say\":\"{say}\",\"{field}\":{list}}}");
                for text in [tag_first, tag_last] {
                    let taken = most(|| {
                        let _ = serde_json::from_str::<FromSender>(&text);
                        let _ = serde_json::from_str::<FromReceiver>(&text);
                    });
                    assert!(taken < LIST, "{field} of {say}: {taken} for {} bytes", text.len());
                }
            }
        }
    }
}
