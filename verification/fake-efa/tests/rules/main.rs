//! The model's rules, one by one, through its C interface: what is allowed goes well and leaves no violation in the
//! log, what is not is answered as documented, and named in the log.

#![allow(missing_docs, unreachable_pub)] // Nobody outside sees it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

mod delivery;
mod failures;
mod offers;
mod rig;
mod strictness;
