//! What a library has to say, asked by a child process.
//!
//! Loading a library runs its code, and the first question makes it probe devices; what a broken one does
//! then happens to the child. That there is none is an answer like any other.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Half a second is usual.
const PATIENCE: Duration = Duration::from_secs(20);

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Asked<T> {
    /// A library, and what it has.
    Found(T),
    /// None, and where it was looked for.
    NotFound(String),
    /// One that fails when it is asked, or whose child was lost.
    Fails(String),
}

/// Asks. `program` starts this program, as the child that the hidden subcommand `command` makes.
#[must_use]
pub fn ask<T: DeserializeOwned>(mut program: Command, command: &str) -> Asked<T> {
    let child = program
        .arg(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    match child {
        Ok(child) => answer(Reaped(child), PATIENCE),
        Err(error) => Asked::Fails(format!("no child process could be started: {error}")),
    }
}

/// The child's part: prints what was found.
///
/// # Errors
///
/// An I/O error of the standard output.
pub fn say<T: Serialize>(found: &Asked<T>) -> std::io::Result<()> {
    let text = serde_json::to_string(found)?;
    writeln!(std::io::stdout(), "{text}")
}

/// Kills and reaps on every way out.
struct Reaped(Child);

impl Reaped {
    /// How it ended by itself, once its output has.
    fn end(&mut self) -> Option<ExitStatus> {
        self.0.wait().ok()
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn answer<T: DeserializeOwned>(mut child: Reaped, patience: Duration) -> Asked<T> {
    let out = child.0.stdout.take();
    let (give, take) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        if let Some(mut out) = out {
            let _ = out.read_to_end(&mut said);
        }
        let _ = give.send(said);
    });
    let said = take.recv_timeout(patience);
    let result = match &said {
        Ok(said) => serde_json::from_slice(said).unwrap_or_else(|_| {
            let end = child.end().map_or_else(|| "unknown".to_owned(), |end| end.to_string());
            Asked::Fails(format!("the process that loaded it said nothing of use ({end})"))
        }),
        Err(_) => Asked::Fails(format!("it did not answer within {patience:?}")),
    };
    drop(child);
    // The child is gone, and its output with it.
    let _ = reader.join();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_says_nothing_of_use_is_told_of() {
        let ask = |program: &str| ask::<String>(Command::new(program), "__probe");
        let Asked::Fails(why) = ask("/bin/echo") else { panic!("it is echo") };
        assert!(why.contains("exit status: 0"), "{why}");
        let Asked::Fails(why) = ask("/nonexistent") else { panic!("no program") };
        assert!(why.contains("no child process"), "{why}");
        let slow = Command::new("/bin/sleep").arg("60").stdout(Stdio::piped()).spawn().unwrap();
        let limit = Duration::from_millis(20);
        assert!(matches!(
            answer::<String>(Reaped(slow), limit),
            Asked::Fails(why) if why.contains("20ms")
        ));
    }
}
