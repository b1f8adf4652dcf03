//! libfabric from Rust: the part of its binary interface that is used here, found and loaded at run time.
//!
//! Nothing is linked, and nothing of libfabric's is needed to build: a program with this crate in it starts on any
//! machine, and learns from [`Library::load`] whether there is a libfabric. Only six functions are symbols; all
//! others are entries of tables behind the objects, and [`inline`] has them under the names of the C header.
//!
//! This crate knows C types and calling conventions, and nothing of what is done with them: no handle is owned,
//! nothing is closed, no error is interpreted. Who implements a library of the same interface finds the types here
//! as well, every entry of every table with its signature.
//!
//! # Invariants
//!
//! 1. Each structure, field, signature and constant in [`abi`] is as in libfabric's headers. `tests/headers.rs` has a
//!    C compiler compare them with the ones that are installed.
//! 2. Structures that the library allocates (`fi_info` and what hangs on it) end where ABI `FABRIC_1.3` ends them:
//!    later versions only append. Those that callers allocate have the largest size known, and are to be zeroed.
//! 3. A library is never unloaded: providers keep threads, and handlers for `fork`.

pub mod abi;
pub mod inline;
mod load;

pub use abi::*;
pub use inline::*;
pub use load::{ENVIRONMENT, Library, LoadError, Tried, Version};
