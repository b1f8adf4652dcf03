//! Real processes of the program under test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; a test that needs it all has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The program, with `args`.
pub(crate) fn immwire<A: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_immwire"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs it to its end; panics if it does not come to one.
pub(crate) fn run<A: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = A>) -> Output {
    ended(immwire(args).spawn().unwrap())
}

/// Waits for the end, with all that was said. What is said must fit a pipe until then.
pub(crate) fn ended(mut child: Child) -> Output {
    let status = status(&mut child);
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    if let Some(mut out) = child.stdout.take() {
        out.read_to_end(&mut stdout).unwrap();
    }
    if let Some(mut err) = child.stderr.take() {
        err.read_to_end(&mut stderr).unwrap();
    }
    Output { status, stdout, stderr }
}

/// Waits for the end.
pub(crate) fn status(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Polls until `done`.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A process that has printed an address. Killed when dropped.
pub(crate) struct Listening {
    pub(crate) child: Child,
    pub(crate) address: String,
    _out: BufReader<ChildStdout>,
}

impl Listening {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut address = String::new();
        out.read_line(&mut address).unwrap();
        assert!(address.starts_with("iw1:"), "{address:?}: {:?}", child.try_wait());
        Self { child, address: address.trim().to_owned(), _out: out }
    }

    /// `recv --dir DIR --once`.
    pub(crate) fn once(dir: &Path) -> Self {
        let dir = dir.to_str().unwrap();
        Self::start(immwire(["recv", "--once", "--dir", dir]))
    }

    /// `recv --dir DIR`.
    pub(crate) fn receiver(dir: &Path) -> Self {
        Self::start(immwire(["recv", "--dir", dir.to_str().unwrap()]))
    }

    /// Waits for its own end.
    pub(crate) fn ended(mut self) -> Output {
        let status = status(&mut self.child);
        let mut stderr = Vec::new();
        self.child.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        Output { status, stdout: Vec::new(), stderr }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Bytes that are nowhere the same.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    immwire_cli::bench::pattern::fill(seed, 0, &mut out);
    out
}
