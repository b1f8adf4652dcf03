//! What every provider must do, shown between two processes and within one.
//!
//! A provider is one more entry in [`PROVIDERS`]; each test below runs for each of them. Most tests run
//! in all combinations that matter of
//!
//! - *place*: the other side is another process, or a thread of this one;
//! - *motor*: engines have threads, or are polled by their callers;
//! - *NICs*: one each, four each, one against four and four against one.
//!
//! `cargo test --test conformance` runs all; a part of a name picks some, as usual. A failure names the
//! test, and the seed; `IMMWIRE_SEED` sets it.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what is wrong by panicking"
)]

mod agent;
mod close;
mod crowd;
mod ends;
mod faults;
mod foreign;
mod host;
mod hostile;
mod life;
mod operations;
mod sizes;
mod trust;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use immwire::shm::{ForeignPath, GroupKey};
use immwire::{Builder, TransferEngine};
use libtest_mimic::{Arguments, Failed, Trial};

use crate::agent::Agent;
use crate::host::{Foreign, Host, Motor, Pattern, Setup};

/// A way to build engines that the suite is to be run with.
pub struct Provider {
    pub name: &'static str,
    /// Engines of it; what every provider has in common is set by the caller.
    pub builder: fn(&Setup) -> Builder,
    /// The name of the socket that strangers can reach, if it is one in the abstract namespace.
    pub socket_name: Option<fn(&TransferEngine) -> String>,
}

const PROVIDERS: [Provider; 1] = [Provider {
    name: "shm",
    builder: |setup| {
        let builder = TransferEngine::builder().foreign_path(match setup.foreign {
            Foreign::Auto => ForeignPath::Auto,
            Foreign::Kernel => ForeignPath::KernelOnly,
            Foreign::Bounce => ForeignPath::BounceOnly,
        });
        match &setup.key {
            Some(secret) => builder.group_key(GroupKey::derive(secret.as_bytes())),
            None => builder,
        }
    },
    socket_name: Some(|engine| {
        let address = engine.address().nics()[0].address.clone();
        let hex = address.iter().map(|byte| format!("{byte:02x}"));
        format!("immwire-{}", hex.collect::<String>())
    }),
}];

impl Provider {
    /// The provider of that name.
    pub fn named(name: &str) -> &'static Self {
        PROVIDERS.iter().find(|provider| provider.name == name).expect("a provider of that name")
    }
}

/// Where the other side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    OneProcess,
    TwoProcesses,
}

/// One combination that a test runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    pub provider: &'static str,
    pub place: Place,
    pub motor: Motor,
    /// Ours, and the other side's.
    pub nics: (u8, u8),
    pub seed: u64,
}

impl Case {
    /// What engines of this case are built from.
    pub fn setup(&self, nics: u8) -> Setup {
        Setup {
            provider: self.provider.to_owned(),
            motor: self.motor,
            nics,
            transfers: 1024,
            drain_ms: 1000,
            silent_ms: None,
            key: None,
            foreign: Foreign::Auto,
        }
    }

    /// Our side.
    pub fn me(&self) -> Host {
        Host::new(&self.setup(self.nics.0))
    }

    /// Another side, without an engine.
    pub fn bare_agent(&self, name: &str) -> Agent {
        match self.place {
            Place::OneProcess => Agent::thread(name),
            Place::TwoProcesses => Agent::process(name),
        }
    }

    /// Another side, and its address.
    pub fn agent(&self, name: &str) -> (Agent, immwire::NetAddr) {
        let mut agent = self.bare_agent(name);
        let address = agent.build(&self.setup(self.nics.1));
        (agent, address)
    }

    /// Both sides, connected by us.
    pub fn pair(&self) -> (Host, Agent, immwire::PeerId) {
        let me = self.me();
        let (agent, address) = self.agent("other");
        let peer = me.peer(&address);
        (me, agent, peer)
    }

    /// The `n`-th pattern of this run.
    pub fn pattern(&self, n: u64) -> Pattern {
        Pattern(self.seed ^ n.wrapping_mul(0xa076_1d64_78bd_642f))
    }

    /// A generator of its own.
    pub fn random(&self) -> Random {
        Random(self.seed | 1)
    }
}

/// Numbers that follow from a seed.
pub struct Random(u64);

impl Random {
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).expect("small");
            items.swap(last, other);
        }
    }
}

/// In which combinations a test runs.
#[derive(Clone, Copy)]
pub enum Spread {
    /// All of them.
    All,
    /// Engines with threads: both places, all NICs.
    Threads,
    /// Engines with threads, one NIC and four: both places.
    Places,
    /// Engines with threads, in two processes, one NIC each.
    Processes,
    /// As above, and polled.
    ProcessesBothMotors,
    /// Once.
    Once,
}

const ALL_NICS: [(u8, u8); 4] = [(1, 1), (4, 4), (1, 4), (4, 1)];

impl Spread {
    fn cases(self, provider: &'static str, seed: u64) -> Vec<Case> {
        use Motor::{Polled, Thread};
        use Place::{OneProcess, TwoProcesses};
        let (places, motors, nics): (&[Place], &[Motor], &[(u8, u8)]) = match self {
            Self::All => (&[OneProcess, TwoProcesses], &[Thread, Polled], &ALL_NICS),
            Self::Threads => (&[OneProcess, TwoProcesses], &[Thread], &ALL_NICS),
            Self::Places => (&[OneProcess, TwoProcesses], &[Thread], &ALL_NICS[..2]),
            Self::Processes | Self::Once => (&[TwoProcesses], &[Thread], &ALL_NICS[..1]),
            Self::ProcessesBothMotors => (&[TwoProcesses], &[Thread, Polled], &ALL_NICS[..1]),
        };
        let mut cases = Vec::new();
        for &place in places {
            for &motor in motors {
                for &nics in nics {
                    cases.push(Case { provider, place, motor, nics, seed });
                }
            }
        }
        cases
    }
}

/// A test: its name, where it runs, and what it does.
pub type Test = (&'static str, Spread, fn(&Case));

fn trial(name: &str, case: Case, body: fn(&Case)) -> Trial {
    let place = match case.place {
        Place::OneProcess => "one_process",
        Place::TwoProcesses => "two_processes",
    };
    let motor = match case.motor {
        Motor::Thread => "thread",
        Motor::Polled => "polled",
    };
    let (ours, theirs) = case.nics;
    let name = format!("{}::{name}::{place}::{motor}::{ours}x{theirs}", case.provider);
    Trial::test(name, move || {
        catch_unwind(AssertUnwindSafe(|| body(&case))).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?");
            Failed::from(format!("{text}\nIMMWIRE_SEED={:#x} in {case:?}", case.seed))
        })
    })
}

fn seed() -> u64 {
    let given = std::env::var("IMMWIRE_SEED").ok().map(|text| {
        let digits = text.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).expect("IMMWIRE_SEED is a hexadecimal number")
    });
    given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = now.map_or(0, |now| now.as_nanos());
        u64::try_from(nanos & u128::from(u64::MAX)).unwrap_or(0)
    })
}

fn main() -> ExitCode {
    if agent::serve_if_asked() {
        return ExitCode::SUCCESS;
    }
    let seed = seed();
    let modules: [&[Test]; 10] = [
        operations::TESTS,
        sizes::TESTS,
        foreign::TESTS,
        crowd::TESTS,
        ends::TESTS,
        close::TESTS,
        faults::TESTS,
        hostile::TESTS,
        life::TESTS,
        trust::TESTS,
    ];
    let mut trials = Vec::new();
    for provider in &PROVIDERS {
        for &(name, spread, body) in modules.iter().copied().flatten() {
            for case in spread.cases(provider.name, seed) {
                trials.push(trial(name, case, body));
            }
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
