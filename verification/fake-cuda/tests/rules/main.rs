//! The library's rules, through the driver's C interface, in a process for each test: what is allowed goes well and leaves
//! nothing in the log; what is not ends the process, and is named in the log.

#![allow(missing_docs, unreachable_pub)] // Nobody outside sees it.
#![allow(clippy::macro_metavars_in_unsafe)] // Calls of the driver, each of which would say the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

mod broken;
mod exchange;
mod kept;
mod rig;
