//! A rule was broken: it is said, and the process ends, so that no test passes by.
//!
//! One line to the standard error, and one appended to the file that `IMMWIRE_FAKE_CUDA_LOG` names:
//! `fake-cuda: PID: RULE: DETAIL`. Then `abort`.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident = $name:literal,)*) => {
        /// What a program may not do.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Rule { $($(#[$doc])* $rule,)* }

        impl Rule {
            fn name(self) -> &'static str {
                match self { $(Self::$rule => $name,)* }
            }
        }
    };
}

rules! {
    /// A call before `cuInit`.
    NotInitialized = "not initialised",
    /// A call that needs a current context, on a thread that has none.
    NoContext = "no context is current",
    /// A context popped from a thread that had pushed none.
    PoppedTooOften = "popped, not pushed",
    /// A stream, function or event used with another context than its own.
    WrongContext = "wrong context",
    /// A handle that was destroyed, or never given out.
    Handle = "no such handle",
    /// A module unloaded while a kernel of it is enqueued or runs.
    ModuleInUse = "module in use",
    /// An address that is in no live memory.
    NotMemory = "not in live memory",
    /// Memory that this GPU has no access to, or may not write.
    NoAccess = "no access",
    /// Memory freed, unmapped or closed while work that uses it is enqueued or runs.
    MemoryInUse = "memory in use",
    /// What was freed, unmapped or closed is not memory of that kind (any more).
    FreedTwice = "freed, not allocated",
    /// Memory mapped where some is mapped.
    MappedOver = "mapped over a mapping",
    /// Memory unmapped, or addresses given back, other than as they were mapped or taken: a part, or too much.
    NotAsMapped = "not as it was mapped",
    /// A reference to memory that goes while another thread unmaps it.
    ReleasedMeanwhile = "released while it is unmapped",
    /// Memory freed that another process still has open by its handle.
    OpenElsewhere = "freed, open in another process",
    /// An address that is not a multiple of what it must be.
    Misaligned = "misaligned",
    /// A launch that the kernel's header does not allow.
    Geometry = "geometry",
    /// Memory that a launch names, on another GPU than it must be, or not in host memory.
    Misplaced = "misplaced",
    /// A kernel that could not go on, or used more than it was launched with.
    WentWrong = "went wrong",
    /// Two launches that share a word of arrivals, or one that is not zero.
    Arrivals = "arrivals",
    /// The same of a word that counts who asks for turns.
    Turns = "turns",
    /// A call of the driver's from a function that `cuLaunchHostFunc` calls.
    CallInHostFunction = "called in a host function",
    /// A call that makes the capture of a graph fail, or a stream drawn into one.
    Captured = "while a stream is captured",
    /// Memory that a NIC was given, and whose copies may still be under way when their calls return.
    NotSynchronous = "copies not completed for NICs",
    /// An argument that the driver has, and this library does not.
    NotModelled = "not modelled",
}

/// Says that `rule` was broken, and ends the process.
pub(crate) fn violation(rule: Rule, detail: fmt::Arguments<'_>) -> ! {
    let line = format!("fake-cuda: {}: {}: {detail}\n", std::process::id(), rule.name());
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("IMMWIRE_FAKE_CUDA_LOG") {
        let opened = OpenOptions::new().append(true).create(true).open(path);
        let _ = opened.and_then(|mut file| file.write_all(line.as_bytes()));
    }
    std::process::abort()
}

/// `broken!(Rule, "format", ...)`: see [`violation`].
macro_rules! broken {
    ($rule:ident, $($detail:tt)*) => {
        $crate::violation::violation($crate::violation::Rule::$rule, format_args!($($detail)*))
    };
}
pub(crate) use broken;
