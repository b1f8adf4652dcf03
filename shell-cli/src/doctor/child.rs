//! What a library has to say, asked by a child process.
//!
//! Loading a library runs its code, and the first question makes it probe devices; what a broken one does
//! then happens to the child. That there is none is an answer like any other.
//!
//! # Invariants
//!
//! Every wait has a deadline, whatever the child does: keeps still, closes its output and lives on, leaves
//! its output to a process of its own, or hangs in a driver where no signal reaches it.

use crate::signals;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Half a second is usual.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// How long a child has to end that has said what it says, or was killed.
const ENDS_WITHIN: Duration = Duration::from_secs(1);
/// How often whoever waits looks up.
const LOOK: Duration = Duration::from_millis(10);
/// The longest answer, in bytes.
const SAID_MAX: u64 = 16 << 20;

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

/// Kills on every way out, and reaps whoever can die.
pub(super) struct Reaped(pub(super) Child);

impl Reaped {
    /// How it ended by itself, once it has said what it says; `None` if it does not end soon.
    fn end(&mut self) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.0.try_wait() {
                Ok(None) if start.elapsed() < ENDS_WITHIN => std::thread::sleep(LOOK),
                ended => return ended.ok().flatten(),
            }
        }
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        // A child that hangs in a driver dies when the driver lets it, which may be never.
        let _ = self.end();
    }
}

fn answer<T: DeserializeOwned>(mut child: Reaped, patience: Duration) -> Asked<T> {
    let out = child.0.stdout.take();
    let (give, take) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        if let Some(out) = out {
            // To the end of the line, not of the pipe: others may have inherited that.
            let _ = BufReader::new(out.take(SAID_MAX)).read_until(b'\n', &mut said);
        }
        let _ = give.send(said);
    });
    let said = heard(&take, patience);
    let result = match &said {
        Ok(said) => serde_json::from_slice(said).unwrap_or_else(|_| {
            let end = child.end().map_or_else(|| "still running".to_owned(), |end| end.to_string());
            Asked::Fails(format!("the process that loaded it said nothing of use ({end})"))
        }),
        Err(why) => Asked::Fails(why.clone()),
    };
    drop(child);
    if said.is_ok() || take.recv_timeout(ENDS_WITHIN) != Err(RecvTimeoutError::Timeout) {
        let _ = reader.join();
    }
    // Else a process that the child started has its output still, and may keep it: the thread that reads it
    // is let go. It owns what it uses, and ends with that process or with this one.
    result
}

/// What the reader gives within `patience`, else why not.
fn heard(take: &Receiver<Vec<u8>>, patience: Duration) -> Result<Vec<u8>, String> {
    let start = Instant::now();
    loop {
        let left = patience.saturating_sub(start.elapsed());
        match take.recv_timeout(left.min(LOOK)) {
            Ok(said) => return Ok(said),
            Err(RecvTimeoutError::Disconnected) => return Ok(Vec::new()),
            Err(RecvTimeoutError::Timeout) if signals::interrupted() => {
                return Err("interrupted before it answered".to_owned());
            }
            Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                return Err(format!("it did not answer within {patience:?}"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

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

    /// `script`, run by a shell, with all that it starts in one group.
    fn shell(script: &str) -> (Reaped, Group) {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).process_group(0);
        let quiet = || Stdio::null();
        let child = shell.stdin(quiet()).stdout(Stdio::piped()).stderr(quiet()).spawn().unwrap();
        let group = Group(rustix::process::Pid::from_child(&child));
        (Reaped(child), group)
    }

    /// Kills what a shell has left behind.
    struct Group(rustix::process::Pid);

    impl Drop for Group {
        fn drop(&mut self) {
            let _ = rustix::process::kill_process_group(self.0, rustix::process::Signal::KILL);
        }
    }

    #[test]
    fn a_child_is_given_up_whatever_holds_its_output() {
        for (script, why) in [
            ("sleep 60 & wait", "20ms"),
            ("exec >&-; sleep 60", ""),
            ("echo nonsense; sleep 60", ""),
            ("sleep 60 & exit 3", "20ms"),
        ] {
            let start = Instant::now();
            let (child, _group) = shell(script);
            let answered = answer::<String>(child, Duration::from_millis(20));
            assert!(
                matches!(&answered, Asked::Fails(said) if said.contains(why)),
                "{script}: {answered:?}"
            );
            assert!(start.elapsed() < Duration::from_secs(20), "{script}");
        }
    }

    #[test]
    fn an_answer_is_taken_as_soon_as_its_line_is_there() {
        let start = Instant::now();
        let (child, _group) = shell(r#"echo '{"found":"it"}'; sleep 60 & sleep 60"#);
        let answered = answer::<String>(child, Duration::from_secs(20));
        assert_eq!(answered, Asked::Found("it".to_owned()));
        assert!(start.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn a_child_that_lives_on_without_its_output_is_told_of() {
        let (child, _group) = shell("exec >&-; sleep 60");
        let answered = answer::<String>(child, Duration::from_secs(20));
        assert!(
            matches!(&answered, Asked::Fails(why) if why.contains("still running")),
            "{answered:?}"
        );
    }
}
