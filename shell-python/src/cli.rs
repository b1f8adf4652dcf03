//! The `immwire` command, for the entry point of the wheel.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line ``args`` (the first is the program's name); returns its exit code. ``program`` is how
/// the command is started once more, for processes that it starts for itself.
#[pyfunction(name = "_run_cli")]
#[pyo3(signature = (args, program, /))]
pub(crate) fn run_cli(py: Python<'_>, args: Vec<OsString>, program: Vec<OsString>) -> u8 {
    py.detach(|| immwire_cli::run_as(args, program))
}
