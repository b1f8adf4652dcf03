//! libibverbs from Rust: the part of its binary interface that is used here, found and loaded at run time.
//!
//! Nothing is linked, and nothing of rdma-core is needed to build: a program with this crate in it starts on any
//! machine, and learns from [`Library::load`] whether there is a libibverbs. That there is one says nothing of devices:
//! without any, `ibv_get_device_list` returns an empty list. What a device does on the way of data is not a symbol, but
//! an entry of its context's table; [`inline`] has these under the names of the C header.
//!
//! This crate knows C types and calling conventions, and nothing of what is done with them: no handle is owned,
//! nothing is destroyed, no error is interpreted.
//!
//! # Invariants
//!
//! 1. Each structure, field, signature and constant in [`abi`] is as in libibverbs's headers. `tests/headers.rs` has a
//!    C compiler compare them with the ones that are installed.
//! 2. Structures that the library allocates are declared up to the last field that is used; those that callers
//!    allocate are declared whole, unless they say how long they are, or what of them is meant.
//! 3. A library is never unloaded: it keeps drivers, and handlers for `fork`.

pub mod abi;
pub mod inline;
mod load;

pub use abi::*;
pub use inline::*;
pub use load::{ENVIRONMENT, Library, LoadError, Tried};
