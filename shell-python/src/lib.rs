//! The module `immwire._immwire`: the engine for Python. It converts, calls, and detaches from the
//! interpreter while it waits; what is decided is decided in `immwire`.
//!
//! | module | what |
//! |---|---|
//! | `engine` | `TransferEngine` |
//! | `region`, `memory`, `buffer` | memory, given out and taken in |
//! | `transfer`, `counter`, `messages` | what is waited for |
//! | `peers`, `places` | peers that come up, room for transfers |
//! | `watcher` | words that GPUs store to |
//! | `moe` | dispatch and combine among ranks |
//! | `waiting` | `await`, on any event loop |
//! | `pages`, `values`, `errors` | arguments, values, exceptions |
//! | `fork`, `sync` | processes and threads |
//!
//! # Invariants
//!
//! - No lock is held while Python code runs, and none but a thread that detached waits for an engine.
//! - Every class is frozen, and what changes in it is behind a lock or an atomic: no interpreter lock is
//!   relied on.
//! - What a parent process made is neither used nor dropped in a forked child.

mod buffer;
mod cli;
mod counter;
mod engine;
mod errors;
mod flag;
mod fork;
mod memory;
mod messages;
mod moe;
mod pages;
mod peers;
mod places;
mod region;
mod streams;
mod sync;
mod transfer;
mod values;
mod waiting;
mod watcher;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _immwire {
    use super::{Bound, PyModule, PyModuleMethods, PyResult, fork, region};

    #[pymodule_export]
    use super::cli::run_cli;
    #[pymodule_export]
    use super::counter::ImmCounter;
    #[pymodule_export]
    use super::engine::{TransferEngine, close_all};
    #[pymodule_export]
    use super::flag::{Following, GpuFlag};
    #[pymodule_export]
    use super::moe::{GpuAllToAll, GpuJoining, HostAllToAll, Joining, MoeReport, Received};
    #[pymodule_export]
    use super::pages::PageIndices;
    #[pymodule_export]
    use super::streams::StreamWait;
    #[pymodule_export]
    use super::transfer::Transfer;
    #[pymodule_export]
    use super::values::{Message, MrDesc, NetAddr, Nic, PeerGroup, PeerId, Stats, Target};
    #[pymodule_export]
    use super::waiting::Waiting;
    #[pymodule_export]
    use super::watcher::UvmWatcher;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        fork::watch();
        if std::env::var_os("IMMWIRE_LOG").is_some() {
            immwire_cli::log();
        }
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("Region", region::class(module.py())?)
    }
}
