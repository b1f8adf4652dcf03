//! What a fork of the process does to memory that devices have been given.
//!
//! A device writes to the pages that a process had when it registered them. When the process forks, by itself or by whatever starts a
//! program for it, the kernel lets both processes share each page until one of them writes to it: if that is the parent, it gets another page,
//! and the device goes on with the old one. From then on what peers write is not what the parent reads, and nothing says so. Linux 5.13 and
//! later copies registered pages for the child at once; before that libibverbs can have the kernel leave them out of the child
//! (`MADV_DONTFORK`), if it is asked to before anything is registered: ibv_fork_init(3), ibv_is_fork_initialized(3).
//!
//! Knows no device and no memory.
//!
//! # Invariant
//!
//! The library is asked once, whoever begins first, and by one thread at a time: it does not guard what it makes for this.

use std::fmt;
use std::sync::OnceLock;

use ibverbs_sys::{IBV_FORK_UNNEEDED, Library, ibv_fork_status};

/// What becomes of registered memory if this process forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forks {
    /// Nothing: the kernel gives the child pages of its own at once.
    Copied,
    /// Nothing, but the child does not have these pages, and ends if it touches one (`SIGSEGV`), or what lies on the same page. Memory in
    /// huge pages is registered only if `RDMAV_HUGEPAGES_SAFE` is set.
    LeftOut,
    /// What peers write may be lost to the parent, without a word, once it writes to a page itself. That is so if something else in this
    /// process has registered memory with libibverbs before, and did not prepare for forks.
    Unsafe {
        /// What ibv_fork_init(3) returned.
        errno: i32,
    },
}

impl fmt::Display for Forks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copied => {
                write!(f, "forks are harmless: the kernel copies registered pages for the child")
            }
            Self::LeftOut => write!(
                f,
                "forks are harmless to this process; its children do not have registered pages"
            ),
            Self::Unsafe { errno } => write!(
                f,
                "a fork would corrupt registered memory (ibv_fork_init: error {errno}): begin the first engine before other users of \
                 libibverbs register memory, set IBV_FORK_SAFE=1 before the process starts, or take Linux 5.13 or later"
            ),
        }
    }
}

/// Has the process's library prepare for forks, where that is needed, if it was not asked to before. To be called before memory is
/// registered.
pub(super) fn prepare(library: &'static Library) -> Forks {
    static FOUND: OnceLock<Forks> = OnceLock::new();
    let symbols = &library.symbols;
    // SAFETY: ibv_is_fork_initialized(3) and ibv_fork_init(3) take nothing; nobody else here calls them, and this is done once.
    *FOUND.get_or_init(|| unsafe {
        let status = symbols.ibv_is_fork_initialized.map(|status| status());
        judge(status, || (symbols.ibv_fork_init)())
    })
}

/// `status`: what the library says, if it is new enough; `init` prepares, and returns 0 or an error.
fn judge(status: Option<ibv_fork_status>, init: impl FnOnce() -> i32) -> Forks {
    if status == Some(IBV_FORK_UNNEEDED) {
        return Forks::Copied;
    }
    match init() {
        0 => Forks::LeftOut,
        errno => Forks::Unsafe { errno },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ibverbs_sys::{IBV_FORK_DISABLED, IBV_FORK_ENABLED};
    use std::cell::Cell;

    #[test]
    fn it_is_prepared_for_forks_unless_the_kernel_is() {
        for status in
            [None, Some(IBV_FORK_DISABLED), Some(IBV_FORK_ENABLED), Some(IBV_FORK_UNNEEDED)]
        {
            for answer in [0, libc::EINVAL] {
                let asked = Cell::new(0);
                let found = judge(status, || {
                    asked.set(asked.get() + 1);
                    answer
                });
                let is_needed = status != Some(IBV_FORK_UNNEEDED);
                assert_eq!(asked.get(), i32::from(is_needed), "{status:?}");
                let expected = match (is_needed, answer) {
                    (false, _) => Forks::Copied,
                    (true, 0) => Forks::LeftOut,
                    (true, errno) => Forks::Unsafe { errno },
                };
                assert_eq!(found, expected, "{status:?} {answer}");
            }
        }
    }

    #[test]
    fn who_cannot_be_prepared_is_told_what_to_do() {
        let text = Forks::Unsafe { errno: libc::EINVAL }.to_string();
        assert!(text.contains("error 22") && text.contains("IBV_FORK_SAFE=1"), "{text}");
    }
}
