//! The log: one JSON object a line, each in one write, appended to the file that `FAKE_EFA_LOG` names.
//!
//! `{"violation": RULE, "detail": TEXT, "pid": N}` is a rule that the caller broke; a test of a well-behaved caller
//! demands that there is none. Where no file is named nobody would hear of it, and the process is aborted, with the rule on its
//! standard error. `{"event": NAME, ...}` is what else is worth knowing: `start` has the seed, `enabled` says
//! whether an endpoint may use CUDA and shared memory (the model has neither), `endpoint`
//! (at its close) counts what it did and how much disorder it made, `failed` has an operation's `prov_errno`.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::OnceLock;

macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident = $name:literal,)*) => {
        /// A rule that a caller can break.
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
    /// A completion queue took more entries than it was opened for.
    CqOverrun = "cq overrun",
    /// An operation without a context: it could not be reported.
    ContextMissing = "context missing",
    /// A context that another operation in flight uses, in part or in whole, or that is not aligned.
    ContextShared = "context shared",
    /// The 64 bytes of a context changed while the provider owned them.
    ContextDamaged = "context damaged",
    /// `FI_MR_LOCAL`: bytes without a descriptor.
    DescMissing = "descriptor missing",
    /// A descriptor of no open registration of this domain.
    DescUnknown = "descriptor unknown",
    /// A descriptor that does not cover the buffer.
    DescRange = "descriptor does not cover",
    /// A registration that does not allow this use.
    MrAccess = "registration does not allow",
    /// A registration that breaks the rules of `fi_mr_reg`.
    MrRegister = "registration refused",
    /// A registration closed under a local operation in flight.
    MrInUse = "registration closed in use",
    /// A destination that is not in the address vector.
    AddressUnknown = "address not inserted",
    /// The target of a write never inserted its initiator.
    PeerNotInserted = "initiator not inserted at the target",
    /// An address removed under an operation in flight to it.
    AddressInUse = "address removed in use",
    /// A write longer than `FI_OPT_MAX_RMA_SIZE`.
    RmaTooLong = "write too long",
    /// A message longer than `FI_OPT_MAX_MSG_SIZE`.
    MessageTooLong = "message too long",
    /// Immediate data or a key of more than four bytes.
    TooWide = "more than four bytes",
    /// A list of buffers other than one.
    IovLimit = "not one buffer",
    /// An inline write or message.
    Inject = "inject",
    /// A flag, an attribute or an option that this call does not take.
    Flags = "flags",
    /// A use that the endpoint's `fi_info` does not allow.
    Capability = "capability not asked for",
    /// A call that needs an enabled endpoint, or one that is not enabled yet.
    State = "wrong state",
    /// An endpoint enabled without completion queues or an address vector.
    NotBound = "not bound",
    /// An address vector bound to a second endpoint.
    AvShared = "address vector shared",
    /// An object closed while others stand on it.
    CloseBusy = "closed while in use",
    /// A call on a closed object, or on none.
    Closed = "used after close",
    /// `FI_THREAD_DOMAIN`: two threads in one domain at a time.
    Threads = "two threads in a domain",
    /// A mode or registration mode that the provider requires was taken out of its `fi_info`.
    Mode = "required mode missing",
    /// A function of libfabric that the model has not.
    NotModelled = "not modelled",
}

/// Opened for each line: a library that keeps a file open is noticed by those who count theirs. Returns whether there is a file.
fn line(text: &str) -> bool {
    static PATH: OnceLock<Option<OsString>> = OnceLock::new();
    let Some(path) = PATH.get_or_init(|| std::env::var_os("FAKE_EFA_LOG")) else { return false };
    let opened = OpenOptions::new().append(true).create(true).open(path);
    if let Err(error) = opened.and_then(|mut file| file.write_all(text.as_bytes())) {
        // A log that cannot be written fails the tests that read it.
        eprintln!("fake-efa: {}: {error}", path.display());
    }
    true
}

/// Records that the caller broke `rule`; ends the process where nobody would hear of it.
pub(crate) fn violation(rule: Rule, detail: &str) {
    if !record(rule, detail) {
        eprintln!("fake-efa: {}: {detail}", rule.name());
        std::process::abort();
    }
}

/// Records it; returns whether there is a log.
fn record(rule: Rule, detail: &str) -> bool {
    let detail: String = detail
        .chars()
        .map(|c| if c == '"' || c == '\\' || c.is_control() { '\'' } else { c })
        .collect();
    line(&format!(
        "{{\"violation\": \"{}\", \"detail\": \"{detail}\", \"pid\": {}}}\n",
        rule.name(),
        std::process::id()
    ))
}

/// Records that the caller broke `rule`, and returns `-errno` for it.
pub(crate) fn refuse(rule: Rule, errno: i32, detail: &str) -> i32 {
    violation(rule, detail);
    -errno
}

/// The same of what a caller cannot know before it has tried: it is in the log, and ends nobody's process.
pub(crate) fn refuse_tried(rule: Rule, errno: i32, detail: &str) -> i32 {
    let _ = record(rule, detail);
    -errno
}

/// Records something that is no violation.
pub(crate) fn event(name: &str, numbers: &[(&str, u64)]) {
    let numbers: String =
        numbers.iter().map(|(name, value)| format!(", \"{name}\": {value}")).collect();
    line(&format!("{{\"event\": \"{name}\"{numbers}, \"pid\": {}}}\n", std::process::id()));
}
