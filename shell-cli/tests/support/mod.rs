//! Real processes of the program under test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
#![allow(dead_code, reason = "each test program uses a part")]

use rustix::fs::{OFlags, fcntl_setfl, inotify};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::fd::{AsRawFd, OwnedFd};
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
    /// What it has said on its standard error, as far as that was looked at.
    said: Vec<u8>,
}

impl Listening {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut address = String::new();
        out.read_line(&mut address).unwrap();
        assert!(address.starts_with("iw1:"), "{address:?}: {:?}", child.try_wait());
        Self { child, address: address.trim().to_owned(), _out: out, said: Vec::new() }
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

    /// Waits until it has said `words` on its standard error.
    pub(crate) fn says(&mut self, words: &str) {
        let (err, said) = (self.child.stderr.as_mut().unwrap(), &mut self.said);
        fcntl_setfl(&*err, OFlags::NONBLOCK).unwrap();
        until(words, || {
            match err.read_to_end(said) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => {
                    read.unwrap();
                }
            }
            text(said).contains(words)
        });
    }

    /// Waits for its own end.
    pub(crate) fn ended(mut self) -> Output {
        let status = status(&mut self.child);
        let mut stderr = std::mem::take(&mut self.said);
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
pub(crate) fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Whether it has been stopped, and none of its threads runs any more; each time that it is stopped, once.
pub(crate) fn is_stopped(child: &Child) -> bool {
    let asked = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
    waitid(WaitId::Pid(Pid::from_child(child)), asked).unwrap().is_some()
}

/// Stops a process at each change of files in folders that are watched. The kernel does, within the call that makes the change: whoever
/// is to do something before the next one cannot come too late.
pub(crate) struct Stops(OwnedFd);

impl Stops {
    /// Stops `child` at changes in `folder`, not in those below.
    pub(crate) fn at_changes(child: &Child, folder: &Path) -> Self {
        // `F_SETSIG`, which libc does not have for all.
        const SET_SIGNAL: libc::c_int = 10;
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let stops = Self(inotify::init(flags).unwrap());
        let (fd, pid) = (stops.0.as_raw_fd(), Pid::from_child(child).as_raw_pid());
        let status = libc::O_NONBLOCK | libc::O_ASYNC;
        // SAFETY: of a descriptor that is open, with numbers: nothing is read or written by address.
        let taken = unsafe {
            libc::fcntl(fd, libc::F_SETOWN, pid) == 0
                && libc::fcntl(fd, SET_SIGNAL, libc::SIGSTOP) == 0
                && libc::fcntl(fd, libc::F_SETFL, status) == 0
        };
        assert!(taken, "{}", std::io::Error::last_os_error());
        stops.watch(folder);
        stops
    }

    /// Also at changes in `folder`.
    pub(crate) fn watch(&self, folder: &Path) {
        let changes = inotify::WatchFlags::CREATE | inotify::WatchFlags::MODIFY;
        inotify::add_watch(&self.0, folder, changes).unwrap();
    }

    /// Lets the process go on, to the next change.
    pub(crate) fn go_on(&self, child: &Child) {
        // A change like the last one that was noted would stop nobody.
        let mut noted = [0_u8; 4096];
        loop {
            match rustix::io::read(&self.0, &mut noted) {
                Err(Errno::AGAIN) => break,
                read => assert!(read.unwrap() > 0),
            }
        }
        signal(child, Signal::CONT);
    }
}

/// Bytes that are nowhere the same.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    immwire_cli::bench::pattern::fill(seed, 0, &mut out);
    out
}
