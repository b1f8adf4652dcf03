//! What the kernel lets this process do: tried, not guessed.
//!
//! Sandboxes refuse calls that version numbers promise, so each is made once, harmlessly: a memfd is
//! sealed and thrown away, a socket of our own is called, and a child of our own is written to. The
//! child is this program again, started with [`TARGET_COMMAND`]. Others ask libfabric ([`super::fabric`]), libibverbs
//! ([`super::rdma`]) and the CUDA driver ([`super::cuda`]).

use super::child::{self, PATIENCE, Reaped};
use super::cuda::{self, Cuda};
use super::fabric::{self, Libfabric};
use super::rdma::{self, Verbs};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::net::{accept_with, bind, connect, listen, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use std::io::{Read, Write};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// The hidden subcommand under which this program is the child that is written to.
pub const TARGET_COMMAND: &str = "__probe-target";

const BEFORE: u64 = 0x5555_5555_5555_5555;
const AFTER: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attempt {
    /// It works.
    Works,
    /// It does not, and why.
    Fails(String),
}

impl Attempt {
    /// Whether it works.
    #[must_use]
    pub fn works(&self) -> bool {
        *self == Self::Works
    }

    fn of<E: std::fmt::Display>(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Self::Works,
            Err(error) => Self::Fails(error.to_string()),
        }
    }
}

/// What was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Probes {
    /// Making a memfd and sealing it: what memory that peers map is made of.
    pub memfd_sealing: Attempt,
    /// Writing to the memory of another process of the same user (a child; Yama may still refuse
    /// strangers).
    pub process_vm_writev: Attempt,
    /// Listening on a Unix socket with an abstract name, and being called there: how peers find each
    /// other.
    pub unix_socket: Attempt,
    /// Loading libfabric, and asking for its devices.
    pub libfabric: Libfabric,
    /// Loading libibverbs, and asking for its devices.
    pub verbs: Verbs,
    /// Loading the CUDA driver, and trying each GPU.
    pub cuda: Cuda,
}

/// Tries everything. Each of `programs` starts this program, as a child.
#[must_use]
pub fn probe([target, fabrics, devices, gpus]: [Command; 4]) -> Probes {
    Probes {
        memfd_sealing: Attempt::of(memfd_sealing()),
        process_vm_writev: Attempt::of(write_to_child(target, PATIENCE)),
        unix_socket: Attempt::of(unix_socket()),
        libfabric: child::ask(fabrics, fabric::CHILD_COMMAND),
        verbs: child::ask(devices, rdma::CHILD_COMMAND),
        cuda: child::ask(gpus, cuda::CHILD_COMMAND),
    }
}

fn memfd_sealing() -> Result<(), Errno> {
    let file = memfd_create("immwire-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
}

/// A pair would not do: sandboxes that refuse sockets by their family let it pass.
fn unix_socket() -> Result<(), Errno> {
    const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
    let socket = || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None);
    let mut bits = [0; 16];
    getrandom(&mut bits, GetRandomFlags::empty())?;
    let name = format!("immwire-doctor-{:032x}", u128::from_ne_bytes(bits));
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let listener = socket()?;
    bind(&listener, &name)?;
    listen(&listener, 1)?;
    let caller = socket()?;
    connect(&caller, &name)?;
    accept_with(&listener, FLAGS).map(drop)
}

/// Why the child was not written to.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error("no child process could be started: {0}")]
    Start(std::io::Error),
    #[error("the child process said {0:?} in place of an address")]
    NoAddress(String),
    #[error("the child process said nothing for {0:?}")]
    Silent(Duration),
    #[error("process_vm_writev: {0}")]
    Refused(std::io::Error),
    #[error("process_vm_writev wrote {0} of 8 bytes")]
    Short(isize),
    #[error("process_vm_writev succeeded, but the child does not see the bytes")]
    NotSeen,
}

/// The longest line of our child, an address.
const LINE_MAX: u64 = 64;

/// A line of the child, or what there is of one when its output ends or is too long.
fn line(output: &mut ChildStdout, patience: Duration) -> Result<String, WriteError> {
    let start = Instant::now();
    let mut said = Vec::new();
    while said.last() != Some(&b'\n') && (said.len() as u64) < LINE_MAX {
        let left = patience.saturating_sub(start.elapsed());
        let limit = Timespec::try_from(left).map_err(|_| WriteError::Silent(patience))?;
        match poll(&mut [PollFd::new(&*output, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Err(WriteError::Silent(patience)),
            Ok(_)
                if Read::by_ref(output)
                    .take(1)
                    .read_to_end(&mut said)
                    .map_err(WriteError::Start)?
                    == 0 =>
            {
                break;
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(WriteError::Start(error.into())),
        }
    }
    Ok(String::from_utf8_lossy(&said).into_owned())
}

fn write_to_child(mut program: Command, patience: Duration) -> Result<(), WriteError> {
    let child = program
        .arg(TARGET_COMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(WriteError::Start)?;
    let mut child = Reaped(child);
    let Some(mut output) = child.0.stdout.take() else {
        return Err(WriteError::NoAddress(String::new()));
    };
    let said = line(&mut output, patience)?;
    let address =
        usize::from_str_radix(said.trim(), 16).map_err(|_| WriteError::NoAddress(said))?;
    write_word(child.0.id(), address, AFTER)?;
    drop(child.0.stdin.take());
    let seen = line(&mut output, patience)?;
    if seen.trim() == format!("{AFTER:x}") { Ok(()) } else { Err(WriteError::NotSeen) }
}

fn write_word(pid: u32, address: usize, word: u64) -> Result<(), WriteError> {
    let mut word = word;
    let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: size_of::<u64>() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: size_of::<u64>() };
    let pid = libc::pid_t::try_from(pid).unwrap_or(-1);
    // SAFETY: one local vector over a live local; the remote address is the child's to survive, and
    // is that of a word it keeps for this.
    let wrote =
        unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match wrote {
        8 => Ok(()),
        -1 => Err(WriteError::Refused(std::io::Error::last_os_error())),
        short => Err(WriteError::Short(short)),
    }
}

/// The child's part: prints the address of a word, waits for the end of its input, prints the word.
///
/// # Errors
///
/// An I/O error of the standard streams.
pub fn target() -> std::io::Result<()> {
    let word = Box::new(std::sync::atomic::AtomicU64::new(BEFORE));
    let mut out = std::io::stdout();
    writeln!(out, "{:x}", std::ptr::from_ref(&*word).addr())?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    writeln!(out, "{:x}", word.load(std::sync::atomic::Ordering::Relaxed))?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_not_ours_fails_with_what_it_said() {
        let Attempt::Fails(why) =
            probe([(); 4].map(|()| Command::new("/bin/echo"))).process_vm_writev
        else {
            panic!("echo printed no address")
        };
        assert!(why.contains("__probe-target"), "{why}");
        let Attempt::Fails(why) =
            probe([(); 4].map(|()| Command::new("/nonexistent"))).process_vm_writev
        else {
            panic!("there is no such program")
        };
        assert!(why.contains("no child process"), "{why}");
    }

    #[test]
    fn a_child_that_says_nothing_is_given_up() {
        let script = |text: &str| {
            let mut shell = Command::new("/bin/sh");
            shell.args(["-c", text]);
            shell
        };
        // One that never begins, one that stops in the middle of a line, and one whose output others keep open.
        for text in ["exec sleep 60", "printf 12; exec sleep 60", "sleep 5 & exit"] {
            let start = Instant::now();
            let limit = Duration::from_millis(20);
            let given_up = write_to_child(script(text), limit);
            assert!(
                matches!(given_up, Err(WriteError::Silent(it)) if it == limit),
                "{text}: {given_up:?}"
            );
            assert!(start.elapsed() < Duration::from_secs(20), "{text}");
        }
    }

    #[test]
    fn a_word_of_our_own_can_be_written_or_the_kernel_says_why_not() {
        let word = std::sync::atomic::AtomicU64::new(BEFORE);
        let address = std::ptr::from_ref(&word).addr();
        match write_word(std::process::id(), address, AFTER) {
            Ok(()) => assert_eq!(word.into_inner(), AFTER),
            Err(error) => assert!(matches!(error, WriteError::Refused(_)), "{error}"),
        }
    }

    #[test]
    fn memfds_and_sockets_are_probed_for_real() {
        assert_eq!(Attempt::of(memfd_sealing()), Attempt::Works);
        assert_eq!(Attempt::of(unix_socket()), Attempt::Works);
    }
}
