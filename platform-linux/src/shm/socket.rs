//! The socket of a session: whole messages, a few files with each at most, nothing that blocks.
//!
//! An engine listens on a socket in the abstract namespace, named after 128 random bits: there is no
//! file to clean up or to protect. Who may call is decided by the handshake; that a process can
//! reach the name at all says nothing.
//!
//! # Invariants
//!
//! - Every socket is non-blocking and closed on exec; no call here waits or raises a signal.
//! - Received files are closed on exec, and closed at once if they are more than [`FILES_MAX`].

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The name of an engine's listening socket: these bits, in hexadecimal.
pub(super) type ListenerId = [u8; 16];

/// The longest message either side sends.
pub(super) const MESSAGE_MAX: usize = 4096;

/// The most files that come with one message. The kernel lets 253 (`SCM_MAX_FD`), but those that lie in sockets are counted, for
/// each user, against the same limit as a process's own files, often 1,024: with so many there are 256 in one session at most.
pub(super) const FILES_MAX: usize = 16;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Calls that wait to be accepted; further ones are told to try again.
const BACKLOG: i32 = 128;

fn name(id: &ListenerId) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(
        format!("immwire-{:032x}", u128::from_be_bytes(*id)).as_bytes(),
    )
}

fn socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Opens the socket on which others reach `id`.
pub(super) fn listen(id: &ListenerId) -> Result<OwnedFd, Errno> {
    let listener = socket()?;
    rustix::net::bind(&listener, &name(id)?)?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Calls `id`. `AGAIN`: its backlog is full, try later. `CONNREFUSED`: nobody listens there.
pub(super) fn call(id: &ListenerId) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::connect(&socket, &name(id)?)?;
    Ok(socket)
}

/// Takes one caller; `AGAIN` if there is none.
pub(super) fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::net::accept_with(listener, FLAGS)
}

/// Who made the other end of a connection, as the kernel noted it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Credentials {
    /// Zero if the process cannot be seen from this pid namespace.
    pub(super) pid: i32,
    pub(super) uid: u32,
}

impl Credentials {
    /// Of whom nothing is known.
    pub(super) const UNKNOWN: Self = Self { pid: 0, uid: u32::MAX };
}

/// Returns who made the other end.
pub(super) fn credentials(socket: &OwnedFd) -> Result<Credentials, Errno> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len: libc::socklen_t = 12;
    const { assert!(size_of::<libc::ucred>() == 12) };
    // SAFETY: `found` is a local of exactly `len` bytes, for which any bits are a value. (rustix is
    // not used: it gives the pid a type that cannot be zero, which the kernel does not promise.)
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if status == 0 { Ok(Credentials { pid: found.pid, uid: found.uid }) } else { Err(last_errno()) }
}

/// `asm-generic/socket.h`, Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// A pidfd of who made the other end, closed on exec, if there is one (Linux 5.3).
pub(super) fn process(socket: &OwnedFd) -> Option<OwnedFd> {
    match process_of(socket) {
        Err(Errno::NOPROTOOPT) => process_by_number(socket),
        found => found.ok(),
    }
}

/// Before Linux 6.5. The number of a process that has been reaped may be another's by then; one of another namespace may have none.
fn process_by_number(socket: &OwnedFd) -> Option<OwnedFd> {
    let pid = credentials(socket).ok().and_then(|who| Pid::from_raw(who.pid))?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

fn process_of(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    let mut found: libc::c_int = -1;
    let mut len: libc::socklen_t = 4;
    const { assert!(size_of::<libc::c_int>() == 4) };
    // SAFETY: `found` is a local of exactly `len` bytes, for which any bits are a value.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if status != 0 {
        return Err(last_errno());
    }
    if found < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the kernel has just opened it for us, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}

/// The errno of the libc call that just failed.
pub(super) fn last_errno() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Sends one message, with files if given, [`FILES_MAX`] at most. `AGAIN`: the peer does not read; with files, `TOOMANYREFS`: too
/// many of this user's are on their way; anything else: it is gone.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files));
    // There may be room for one more: space is aligned.
    if !fits || files.len() > FILES_MAX {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // A message is sent whole or not at all.
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
}

/// Whether that is something that this process, its user or the machine has too little of for now, and nobody's fault.
pub(super) const fn is_lack(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS)
}

/// A message that arrived.
#[derive(Debug)]
pub(super) struct Received {
    /// Bytes of it, at the front of the caller's buffer.
    pub(super) len: usize,
    /// The files that came with it, [`FILES_MAX`] at most.
    pub(super) files: Vec<OwnedFd>,
    /// More have come, for which this process had no descriptors left: `RLIMIT_NOFILE` (unix(7), `MSG_CTRUNC` in recvmsg(2)).
    pub(super) is_short: bool,
}

/// Why there is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoMessage {
    /// None has arrived.
    Yet,
    /// The peer has closed its end, or died.
    Gone,
    /// It was longer than any message, or carried too many files. They have been closed.
    Malformed,
}

/// Takes one message. An empty one cannot be told from the end, and is taken for it.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8; MESSAGE_MAX],
) -> Result<Received, NoMessage> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut take =
        || rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags);
    let got = match take() {
        // The peer has closed its end without reading all that we sent. That is said once, and before what it sent itself.
        Err(Errno::CONNRESET) => take(),
        got => got,
    };
    let got = match got {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Err(NoMessage::Yet),
        Err(_) => return Err(NoMessage::Gone),
    };
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    // Allocates nothing if there are none.
    let files: Vec<OwnedFd> = files.flatten().collect();
    if got.bytes == 0 {
        return Err(NoMessage::Gone);
    }
    // There may be room for one more: space is aligned.
    let surplus = files.len() > FILES_MAX;
    let is_cut = got.flags.contains(ReturnFlags::CTRUNC);
    // Cut with room left: it was not the room that lacked.
    let is_short = is_cut && files.len() < FILES_MAX;
    if surplus || (is_cut && !is_short) || got.flags.contains(ReturnFlags::TRUNC) {
        return Err(NoMessage::Malformed);
    }
    Ok(Received { len: got.bytes, files, is_short })
}

/// Whether the other end has been closed, in each process that has it. Does not read.
pub(super) fn is_gone(socket: &OwnedFd) -> bool {
    any_is_ready(&mut [PollFd::new(socket, PollFlags::RDHUP)])
}

/// Whether the other end has been closed, or the process has ended, whoever else has the socket. Does not read.
pub(super) fn is_gone_or_ended(socket: &OwnedFd, process: &OwnedFd) -> bool {
    let ends = [PollFd::new(socket, PollFlags::RDHUP), PollFd::new(process, PollFlags::IN)];
    any_is_ready(&mut { ends })
}

/// Whether a descriptor has something to read: of a process, whether it has ended (pidfd_open(2)).
pub(super) fn is_readable(file: &OwnedFd) -> bool {
    any_is_ready(&mut [PollFd::new(file, PollFlags::IN)])
}

/// Whether there is now what is asked for, or an end or an error, of which poll(2) tells unasked.
fn any_is_ready(fds: &mut [PollFd<'_>]) -> bool {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let kind = SocketType::SEQPACKET;
        rustix::net::socketpair(AddressFamily::UNIX, kind, FLAGS, None).unwrap()
    }

    #[test]
    fn a_message_arrives_whole_with_its_files() {
        let (a, b) = pair();
        let mut buffer = [0; MESSAGE_MAX];
        assert_eq!(receive(&b, &mut buffer).err(), Some(NoMessage::Yet));
        for count in [1, 2, FILES_MAX - 1, FILES_MAX] {
            send(&a, b"one", &vec![a.as_fd(); count]).unwrap();
            send(&a, b"second", &[]).unwrap();
            let got = receive(&b, &mut buffer).unwrap();
            assert_eq!((&buffer[..got.len], got.files.len()), (&b"one"[..], count));
            for file in &got.files {
                let flags = rustix::io::fcntl_getfd(file).unwrap();
                assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            }
            let got = receive(&b, &mut buffer).unwrap();
            assert_eq!((&buffer[..got.len], got.files.len()), (&b"second"[..], 0));
        }
        assert_eq!(send(&a, b"more", &[a.as_fd(); FILES_MAX + 1]), Err(Errno::NOBUFS));
        assert!(!is_gone(&b));
        drop(a);
        assert!(is_gone(&b));
        assert_eq!(receive(&b, &mut buffer).err(), Some(NoMessage::Gone));
        assert!(send(&b, b"x", &[]).is_err());
    }

    #[test]
    fn what_is_too_long_or_has_too_many_files_is_malformed() {
        let (a, b) = pair();
        let mut buffer = [0; MESSAGE_MAX];
        send(&a, &[7; MESSAGE_MAX + 1], &[]).unwrap();
        assert_eq!(receive(&b, &mut buffer).err(), Some(NoMessage::Malformed));
        send(&a, &[7; MESSAGE_MAX], &[]).unwrap();
        assert_eq!(receive(&b, &mut buffer).unwrap().len, MESSAGE_MAX);
        for count in [FILES_MAX + 1, FILES_MAX + 2, 40] {
            let files = vec![a.as_fd(); count];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let bytes = [IoSlice::new(b"x")];
            rustix::net::sendmsg(&a, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap();
            assert_eq!(receive(&b, &mut buffer).err(), Some(NoMessage::Malformed), "{count}");
        }
    }

    /// What was said before the end is heard, whether or not all was read that was said to who said it.
    #[test]
    fn the_last_words_are_heard() {
        for unread in [false, true] {
            let (a, b) = pair();
            let mut buffer = [0; MESSAGE_MAX];
            if unread {
                send(&b, b"not read", &[]).unwrap();
            }
            send(&a, b"last", &[]).unwrap();
            send(&a, b"words", &[]).unwrap();
            drop(a);
            assert!(is_gone(&b));
            for said in ["last", "words"] {
                let got = receive(&b, &mut buffer).unwrap();
                assert_eq!(&buffer[..got.len], said.as_bytes());
            }
            assert_eq!(receive(&b, &mut buffer).err(), Some(NoMessage::Gone));
        }
    }

    #[test]
    fn a_full_socket_says_so_instead_of_blocking() {
        let (a, _b) = pair();
        let full = (0..100_000).find_map(|_| send(&a, &[0; 1024], &[]).err());
        assert_eq!(full, Some(Errno::AGAIN));
    }

    #[test]
    fn callers_and_listeners_see_each_other_s_credentials() {
        let mut id = ListenerId::default();
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()).unwrap();
        assert_eq!(call(&id).err(), Some(Errno::CONNREFUSED));
        let listener = listen(&id).unwrap();
        assert_eq!(accept(&listener).err(), Some(Errno::AGAIN));
        let caller = call(&id).unwrap();
        let callee = accept(&listener).unwrap();
        let me = Credentials {
            pid: i32::try_from(std::process::id()).unwrap(),
            uid: rustix::process::getuid().as_raw(),
        };
        assert_eq!(credentials(&caller).unwrap(), me);
        assert_eq!(credentials(&callee).unwrap(), me);
        assert!(listen(&id).is_err());
    }

    #[test]
    fn both_ends_can_ask_for_each_other_s_process() {
        let (a, b) = pair();
        for process in [process, process_by_number] {
            let [to_a, to_b] = [&b, &a].map(|socket| process(socket).unwrap());
            assert!(!is_readable(&to_a) && !is_readable(&to_b));
            assert!(!is_gone_or_ended(&a, &to_b));
            let flags = rustix::io::fcntl_getfd(&to_a).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        let to_b = process(&a).unwrap();
        drop(b);
        assert!(is_gone_or_ended(&a, &to_b));
    }
}
