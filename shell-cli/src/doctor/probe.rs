//! What the kernel lets this process do: tried, not guessed.
//!
//! Sandboxes refuse calls that version numbers promise, so each is made once, harmlessly: a memfd is
//! sealed and thrown away, a socket of our own is called, and a child of our own is written to. The
//! child is this program again, started with [`TARGET_COMMAND`]. Others ask libfabric ([`super::fabric`]), libibverbs
//! ([`super::rdma`]) and the CUDA driver ([`super::cuda`]).

use super::child;
use super::cuda::{self, Cuda};
use super::fabric::{self, Libfabric};
use super::rdma::{self, Verbs};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::net::{accept_with, bind, connect, listen, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

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
        process_vm_writev: Attempt::of(write_to_child(target)),
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
    #[error("process_vm_writev: {0}")]
    Refused(std::io::Error),
    #[error("process_vm_writev wrote {0} of 8 bytes")]
    Short(isize),
    #[error("process_vm_writev succeeded, but the child does not see the bytes")]
    NotSeen,
}

/// Kills and reaps on every way out.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn write_to_child(mut program: Command) -> Result<(), WriteError> {
    let child = program
        .arg(TARGET_COMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(WriteError::Start)?;
    let mut child = Reaped(child);
    let mut line = String::new();
    let mut answers = child.0.stdout.take().map(BufReader::new);
    if let Some(answers) = &mut answers {
        answers.read_line(&mut line).map_err(WriteError::Start)?;
    }
    let address =
        usize::from_str_radix(line.trim(), 16).map_err(|_| WriteError::NoAddress(line))?;
    write_word(child.0.id(), address, AFTER)?;
    drop(child.0.stdin.take());
    let mut seen = String::new();
    if let Some(answers) = &mut answers {
        answers.read_line(&mut seen).map_err(WriteError::Start)?;
    }
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
