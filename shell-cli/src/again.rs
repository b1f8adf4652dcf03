//! This program once more: how the processes that it starts for itself are started.
//!
//! As a rule that is the executable that runs. Where the command is a part of another program, such as an
//! interpreter, that one says how.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// The command is started by `program`: an executable, and arguments that come before all others. What was
/// said first holds.
pub fn started_by(program: Vec<OsString>) {
    let _ = PROGRAM.set(program);
}

/// A command that starts this program, to be given its arguments.
///
/// # Errors
///
/// An I/O error if this program cannot find itself.
pub fn command() -> std::io::Result<Command> {
    let Some((program, arguments)) = PROGRAM.get().and_then(|program| program.split_first()) else {
        return Ok(Command::new(std::env::current_exe()?));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}
