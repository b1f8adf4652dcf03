//! The twin of `platform-linux/src/sync.rs`, as far as these files use it.

pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
