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

mod absent;
mod agent;
mod close;
mod crowd;
mod disturbed;
mod door;
mod ends;
mod events;
mod faults;
mod foreign;
mod gpus;
mod host;
mod hostile;
mod lacks;
mod life;
mod operations;
mod ports;
mod programs;
mod replacing;
mod segment;
mod sizes;
mod slots;
mod spans;
mod staged;
mod stalls;
mod stranger;
mod trust;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use immwire::shm::{ForeignPath, GroupKey};
use immwire::{Builder, LibfabricOptions, Staging, TransferEngine, Transport, VerbsOptions};
use immwire_cuda::Device;
use libtest_mimic::{Arguments, Failed, Trial};

use crate::agent::Agent;
use crate::host::{Foreign, Host, Motor, Own, Pattern, Setup};

/// A way to build engines that the suite is to be run with.
pub struct Provider {
    pub name: &'static str,
    /// Engines of it; what every provider has in common is set by the caller.
    pub builder: fn(&Setup) -> Builder,
    pub facts: Facts,
}

/// What tests may count on, and what there is to be tested at all. Tests ask for these, never for names.
pub struct Facts {
    /// The ways to a peer's memory that there are.
    pub ways: &'static [Way],
    /// Whether a way can be chosen, or follows from whose memory it is.
    pub chooses_ways: bool,
    /// The name of the socket that strangers can reach, if it is one in the abstract namespace.
    pub socket_name: Option<fn(&TransferEngine) -> String>,
    /// The door that takes messages from strangers, if there is one.
    pub door: Option<Door>,
    /// Memory of a process that does not run is written all the same; not given if that depends on where it is.
    pub writes_into_the_stopped: Option<bool>,
    /// A peer's end is told at once; if not, it shows in what is sent to it, heartbeats at least.
    pub tells_death: bool,
    /// A write that its target does not allow fails alone; if not, the peer is lost by it.
    pub refuses_access_softly: bool,
    /// When a connection is cut, nothing is left in the network: the receiver's memory is quiet, too. If
    /// not, it is when the receiver has closed the region, or ended the session and all that was in it.
    pub flushes_at_the_receiver: bool,
    /// An engine's end closes all its sockets. libfabric forgets, now and then, both ends of a connection
    /// that was being made when an endpoint was closed.
    pub closes_all_sockets: bool,
    /// A stranger's message that is longer than any costs that message. `net` of libfabric 1.17 closes the connection,
    /// and with it loses, now and then, what it knows of others that are being made, or takes none any more; `tcp;ofi_rxm`
    /// resets connections of others.
    pub survives_long_messages: bool,
    /// All of an engine's NICs lead to a peer, so that some may fail.
    pub several_nics: bool,
    /// A NIC whose port goes down takes no peer along.
    pub survives_lost_ports: bool,
    /// Memory of GPUs is written, and read.
    pub has_gpus: bool,
    /// By themselves; if not, by NICs.
    pub gpus_copy: bool,
    /// By way of host memory; this is the provider of engines that do not.
    pub stages: Option<&'static str>,
    /// The host of the next engine, if there is one way to engines of the same host and another to others.
    pub host: Option<fn() -> String>,
    /// Each operation takes long enough that fewer combinations must do.
    pub is_slow: bool,
    /// Memory is pinned when it is registered.
    pub pins: bool,
    /// Pages that take a second or some to be written.
    pub pages_for_a_while: u32,
}

/// What takes messages from strangers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// An endpoint of this provider of libfabric's.
    Endpoint(&'static str),
    /// A queue pair for datagrams.
    QueuePair,
}

/// A way to memory of a peer's: whose it is, and how it is written.
pub type Way = (Foreign, Own);

/// Which of [`PROVIDERS`] run, separated by commas; by default those that every machine has.
const CHOICE: &str = "IMMWIRE_CONFORMANCE";

const PROVIDERS: [Provider; 17] = [
    SHM,
    NVLINK,
    SPAN_NEAR,
    SPAN,
    SPAN_GPUS,
    SPAN_EFA_GPUS,
    SPAN_STAGED,
    SPAN_VERBS,
    libfabric("tcp", "tcp", |setup| over_libfabric(setup, "tcp"), true),
    libfabric("net", "net", |setup| over_libfabric(setup, "net"), false),
    libfabric("rxm", "tcp;ofi_rxm", |setup| over_libfabric(setup, "tcp;ofi_rxm"), false),
    TCP_STAGED,
    EFA,
    EFA_GPUS,
    VERBS,
    VERBS_GPUS,
    VERBS_STAGED,
];

const fn libfabric(
    name: &'static str,
    door: &'static str,
    builder: fn(&Setup) -> Builder,
    survives_long_messages: bool,
) -> Provider {
    Provider {
        name,
        builder,
        facts: Facts { door: Some(Door::Endpoint(door)), survives_long_messages, ..OVER_TCP },
    }
}

/// A device: it writes, acknowledges and refuses without the peer's processor.
const EFA: Provider = Provider {
    name: "efa",
    builder: |setup| over_libfabric(setup, "efa"),
    // Each is a packet or two of a device in software.
    facts: Facts { refuses_access_softly: true, pages_for_a_while: 50_000, ..OVER_TCP },
};

/// With memory of all GPUs in turn, and of the host.
const EFA_GPUS: Provider = Provider {
    name: "efa-gpus",
    builder: |setup| (EFA.builder)(setup).gpus(all_gpus()),
    facts: Facts { has_gpus: true, ..EFA.facts },
};

/// The same memory where nothing but the CPU gets at host memory: by way of that.
const TCP_STAGED: Provider = Provider {
    name: "tcp-staged",
    builder: |setup| staged(over_libfabric(setup, "tcp")),
    // Each goes through four hands.
    facts: Facts { has_gpus: true, stages: Some("tcp"), pages_for_a_while: 20_000, ..OVER_TCP },
};

/// And by NICs that could, and are not asked to.
const VERBS_STAGED: Provider = Provider {
    name: "verbs-staged",
    builder: |setup| staged((VERBS.builder)(setup)),
    facts: Facts {
        has_gpus: true,
        stages: Some("verbs"),
        pages_for_a_while: TCP_STAGED.facts.pages_for_a_while,
        survives_lost_ports: false,
        door: None,
        ..VERBS.facts
    },
};

fn staged(builder: Builder) -> Builder {
    builder.gpus(all_gpus()).staging(Staging::default())
}

/// The same.
const VERBS_GPUS: Provider = Provider {
    name: "verbs-gpus",
    builder: |setup| (VERBS.builder)(setup).gpus(all_gpus()),
    facts: Facts { has_gpus: true, door: None, ..VERBS.facts },
};

/// RDMA NICs: whichever `IMMWIRE_VERBS_DEVICES` names, separated by commas, or all there are.
const VERBS: Provider = Provider {
    name: "verbs",
    builder: |setup| {
        let options = verbs_options(setup);
        let builder = TransferEngine::builder().transport(Transport::Verbs(options));
        match &setup.key {
            Some(secret) => builder.group_key(GroupKey::derive(secret.as_bytes())),
            None => builder,
        }
    },
    facts: Facts {
        door: Some(Door::QueuePair),
        pins: true,
        writes_into_the_stopped: Some(true),
        closes_all_sockets: true,
        survives_long_messages: true,
        survives_lost_ports: true,
        ..OVER_TCP
    },
};

pub fn verbs_options(setup: &Setup) -> VerbsOptions {
    let named = std::env::var("IMMWIRE_VERBS_DEVICES").unwrap_or_default();
    let named = named.split(',').filter(|name| !name.is_empty()).map(str::to_owned);
    let devices = if setup.devices.is_empty() {
        named.collect()
    } else {
        setup.devices.iter().map(|device| as_port(device)).collect()
    };
    let on_demand = std::env::var_os("IMMWIRE_RDMA_ON_DEMAND").is_some();
    let classic = std::env::var_os("IMMWIRE_RDMA_CLASSIC").is_some();
    // Twice as long for an answer as by default: an emulated guest takes longer than a device.
    VerbsOptions { devices, ack_timeout: 15, on_demand, classic, ..VerbsOptions::default() }
}

/// The name of a guest's device: where two are the ports of one (`verification/rdma-guest/ports.c`), the port's.
fn as_port(device: &str) -> String {
    let number = device.strip_prefix("rxe").and_then(|number| number.parse::<u32>().ok());
    match number {
        Some(number) if std::env::var_os("IMMWIRE_RDMA_PORTS").is_some() => {
            format!("rxe{}:{}", number & !1, 1 + (number & 1))
        }
        _ => device.to_owned(),
    }
}

const OVER_TCP: Facts = Facts {
    ways: &[(Foreign::Auto, Own::Engine), (Foreign::Auto, Own::Test)],
    chooses_ways: false,
    socket_name: None,
    door: None,
    writes_into_the_stopped: Some(false),
    tells_death: false,
    refuses_access_softly: false,
    flushes_at_the_receiver: false,
    closes_all_sockets: false,
    survives_long_messages: true,
    several_nics: true,
    survives_lost_ports: false,
    has_gpus: false,
    gpus_copy: false,
    stages: None,
    host: None,
    is_slow: true,
    pins: false,
    pages_for_a_while: 100_000,
};

/// Whichever libfabric `IMMWIRE_LIBFABRIC` names; on loopback, where that is a choice.
fn over_libfabric(setup: &Setup, provider: &str) -> Builder {
    let domain = (provider != "efa").then(|| "lo".to_owned());
    let provider = Some(provider.to_owned());
    let options = LibfabricOptions { provider, domain, ..LibfabricOptions::default() };
    let builder = TransferEngine::builder().transport(Transport::Libfabric(options));
    match &setup.key {
        Some(secret) => builder.group_key(GroupKey::derive(secret.as_bytes())),
        None => builder,
    }
}

const SHM: Provider = Provider {
    name: "shm",
    builder: |setup| {
        let builder = TransferEngine::builder().foreign_path(way(setup));
        match &setup.key {
            Some(secret) => builder.group_key(GroupKey::derive(secret.as_bytes())),
            None => builder,
        }
    },
    facts: Facts {
        ways: &[
            (Foreign::Auto, Own::Engine),
            (Foreign::Kernel, Own::Test),
            (Foreign::Bounce, Own::Test),
        ],
        chooses_ways: true,
        socket_name: Some(|engine| {
            let address = engine.address().nics()[0].address.clone();
            let hex = address.iter().map(|byte| format!("{byte:02x}"));
            format!("immwire-{}", hex.collect::<String>())
        }),
        door: None,
        writes_into_the_stopped: Some(true),
        tells_death: true,
        refuses_access_softly: true,
        flushes_at_the_receiver: true,
        closes_all_sockets: true,
        survives_long_messages: true,
        several_nics: true,
        survives_lost_ports: false,
        has_gpus: false,
        gpus_copy: false,
        stages: None,
        host: None,
        is_slow: false,
        pins: false,
        pages_for_a_while: 100_000,
    },
};

/// The same, with memory of all GPUs in turn, and of the host: every way between them.
const NVLINK: Provider = Provider {
    name: "nvlink",
    builder: |setup| (SHM.builder)(setup).gpus(all_gpus()),
    facts: Facts {
        ways: &[(Foreign::Auto, Own::Engine), (Foreign::Auto, Own::Test)],
        chooses_ways: false,
        has_gpus: true,
        gpus_copy: true,
        is_slow: true,
        // They take them by the hundred.
        pages_for_a_while: 1_000_000,
        ..SHM.facts
    },
};

/// Shared memory beside TCP: all engines on one host.
const SPAN_NEAR: Provider = Provider {
    name: "span-near",
    builder: spanning,
    facts: Facts {
        socket_name: None,
        closes_all_sockets: false,
        several_nics: false,
        host: Some(|| "here".to_owned()),
        is_slow: true,
        ..SHM.facts
    },
};

/// And on two, in turn: of two engines each is on its own, of several some are on the same. What is true of both ways.
const SPAN: Provider = Provider {
    name: "span",
    builder: spanning,
    facts: Facts {
        host: Some(|| {
            static ENGINES: AtomicUsize = AtomicUsize::new(0);
            ["here", "there"][ENGINES.fetch_add(1, Ordering::Relaxed) % 2].to_owned()
        }),
        writes_into_the_stopped: None,
        ..OVER_TCP
    },
};

/// All on one host, with memory of its GPUs, which is no other host's to write to.
const SPAN_GPUS: Provider = Provider {
    name: "span-gpus",
    builder: |setup| spanning(setup).gpus(all_gpus()),
    facts: Facts {
        socket_name: None,
        closes_all_sockets: false,
        several_nics: false,
        host: SPAN_NEAR.facts.host,
        ..NVLINK.facts
    },
};

/// On two hosts in turn, by EFA between them, whose devices reach GPUs' memory as well.
const SPAN_EFA_GPUS: Provider = Provider {
    name: "span-efa-gpus",
    builder: |setup| beside((EFA.builder)(setup), setup).gpus(all_gpus()),
    facts: Facts { host: SPAN.facts.host, writes_into_the_stopped: None, ..EFA_GPUS.facts },
};

/// On two hosts in turn, by TCP between them, over which GPUs' memory goes by way of the host's.
const SPAN_STAGED: Provider = Provider {
    name: "span-staged",
    builder: |setup| staged(spanning(setup)),
    facts: Facts {
        host: SPAN.facts.host,
        writes_into_the_stopped: None,
        stages: Some("span"),
        ..TCP_STAGED.facts
    },
};

/// On two hosts in turn, by RDMA NICs between them.
const SPAN_VERBS: Provider = Provider {
    name: "span-verbs",
    builder: |setup| beside((VERBS.builder)(setup), setup),
    facts: Facts {
        host: SPAN.facts.host,
        writes_into_the_stopped: None,
        door: None,
        ..VERBS.facts
    },
};

fn all_gpus() -> Vec<u32> {
    let gpus = Device::count().expect("GPUs");
    assert!(gpus > 0, "no GPU here");
    (0..gpus).collect()
}

fn spanning(setup: &Setup) -> Builder {
    beside(over_libfabric(setup, "tcp"), setup)
}

fn beside(other: Builder, setup: &Setup) -> Builder {
    let builder = other.shm_on_host(true).foreign_path(way(setup));
    match &setup.host {
        Some(host) => builder.host(host),
        None => builder,
    }
}

const fn way(setup: &Setup) -> ForeignPath {
    match setup.foreign {
        Foreign::Auto => ForeignPath::Auto,
        Foreign::Kernel => ForeignPath::KernelOnly,
        Foreign::Bounce => ForeignPath::BounceOnly,
    }
}

impl Provider {
    /// The provider of that name.
    pub fn named(name: &str) -> &'static Self {
        let known = || PROVIDERS.map(|provider| provider.name).join(", ");
        let found = PROVIDERS.iter().find(|provider| provider.name == name);
        found.unwrap_or_else(|| panic!("there is no provider {name}; there are {}", known()))
    }

    /// Whether memory is to be that of GPUs.
    pub fn has_gpus(&self) -> bool {
        self.facts.has_gpus
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
            idle_ms: None,
            key: None,
            foreign: Foreign::Auto,
            devices: Vec::new(),
            host: self.facts().host.map(|host| host()),
        }
    }

    pub fn facts(&self) -> &'static Facts {
        &Provider::named(self.provider).facts
    }

    /// How soon a survivor must know of a peer's end.
    pub fn soon(&self) -> Duration {
        Duration::from_secs(if self.facts().tells_death { 2 } else { 6 })
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
    /// Engines with threads, in two processes, two NICs each.
    TwoNics,
    /// Once.
    Once,
}

const ALL_NICS: [(u8, u8); 4] = [(1, 1), (4, 4), (1, 4), (4, 1)];

impl Spread {
    fn cases(self, provider: &'static Provider, seed: u64) -> Vec<Case> {
        use Motor::{Polled, Thread};
        use Place::{OneProcess, TwoProcesses};
        let (places, motors, nics): (&[Place], &[Motor], &[(u8, u8)]) = match self {
            Self::All => (&[OneProcess, TwoProcesses], &[Thread, Polled], &ALL_NICS),
            Self::Threads => (&[OneProcess, TwoProcesses], &[Thread], &ALL_NICS),
            Self::Places => (&[OneProcess, TwoProcesses], &[Thread], &ALL_NICS[..2]),
            Self::Processes | Self::Once => (&[TwoProcesses], &[Thread], &ALL_NICS[..1]),
            Self::ProcessesBothMotors => (&[TwoProcesses], &[Thread, Polled], &ALL_NICS[..1]),
            Self::TwoNics => (&[TwoProcesses], &[Thread], &[(2, 2)]),
        };
        let provider_name = provider.name;
        let mut cases = Vec::new();
        for (m, &motor) in motors.iter().enumerate() {
            for (n, &nics) in nics.iter().enumerate() {
                for (p, &place) in places.iter().enumerate() {
                    // Every place, motor and set of NICs is met all the same, but half as often; where all
                    // three vary, every pair of them.
                    if provider.facts.is_slow && places.len() > 1 && (m + n + p) % 2 == 0 {
                        continue;
                    }
                    cases.push(Case { provider: provider_name, place, motor, nics, seed });
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

/// What makes sense where these are the facts: no test passes for want of something to test.
fn tests(facts: &Facts) -> Vec<&'static [Test]> {
    if facts.has_gpus && !facts.gpus_copy && host::are_gpus_unreached() {
        return vec![gpus::UNREACHED];
    }
    let mut modules = vec![
        operations::TESTS,
        sizes::TESTS,
        foreign::TESTS,
        crowd::TESTS,
        ends::TESTS,
        close::TESTS,
        faults::TESTS,
        life::TESTS,
        trust::TESTS,
        programs::TESTS,
    ];
    modules.push(if facts.chooses_ways { foreign::CHOSEN_WAYS } else { foreign::ONE_WAY });
    match facts.writes_into_the_stopped {
        // The rest of them is about a way that is chosen.
        Some(true) if !facts.chooses_ways => modules.push(&faults::WRITTEN_WHILE_STOPPED[..1]),
        Some(true) => modules.push(faults::WRITTEN_WHILE_STOPPED),
        Some(false) => modules.extend([faults::NOT_WRITTEN_WHILE_STOPPED, replacing::TESTS]),
        None => {}
    }
    // With its connection a child holds what a dead peer's GPUs are at, too.
    if facts.tells_death && !facts.has_gpus {
        modules.push(faults::DEATHS);
    }
    if facts.door == Some(Door::QueuePair) {
        modules.push(life::AT_QUEUE_PAIRS);
    }
    if facts.several_nics && facts.writes_into_the_stopped == Some(true) {
        modules.push(life::TOO_LATE);
    }
    if facts.several_nics {
        modules.push(faults::WITH_SEVERAL_NICS);
    }
    if facts.socket_name.is_some() {
        modules.extend([hostile::AT_A_SOCKET, hostile::IN_SHARED_MEMORY]);
    }
    let pins = facts.pins && std::env::var_os("IMMWIRE_RDMA_ON_DEMAND").is_none();
    if pins && !facts.has_gpus {
        modules.push(sizes::WHERE_IT_IS_PINNED);
    }
    if facts.door.is_some() {
        modules.push(door::TESTS);
    }
    if matches!(facts.door, Some(Door::Endpoint(_))) {
        modules.push(door::AT_AN_ENDPOINT);
    }
    if facts.has_gpus {
        modules.push(gpus::TESTS);
        match (facts.gpus_copy, facts.stages) {
            (true, _) => modules.extend([gpus::COPYING, lacks::COPYING]),
            (false, None) => modules.extend([gpus::BY_NICS, gpus::THEMSELVES]),
            (false, Some(_)) => modules.extend([gpus::BY_NICS, staged::TESTS, slots::TESTS]),
        }
        if !facts.gpus_copy && facts.host.is_none() {
            modules.push(gpus::ALL_BY_NICS);
            if facts.stages.is_some() {
                modules.push(staged::ALL_STAGED);
            }
        }
    }
    if facts.host.is_some() {
        modules.push(if facts.gpus_copy { spans::GPUS_NEAR } else { spans::TESTS });
        if !facts.has_gpus {
            modules.push(spans::OTHERS);
        }
    }
    if facts.survives_lost_ports {
        modules.extend(ports::tests(facts));
    }
    modules
}

/// What engines have to say, as the command shows it: a failure comes with their reasons.
fn show_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("IMMWIRE_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

fn main() -> ExitCode {
    show_log();
    if agent::serve_if_asked() {
        return ExitCode::SUCCESS;
    }
    let seed = seed();
    let mut trials = Vec::new();
    let choice = std::env::var(CHOICE).unwrap_or_else(|_| "shm".to_owned());
    let chosen: Vec<_> = choice.split(',').map(Provider::named).collect();
    let lacks_stand_in = chosen.iter().any(|it| it.facts.has_gpus) && !segment::is_stand_in();
    for provider in chosen {
        for &(name, spread, body) in tests(&provider.facts).into_iter().flatten() {
            let is_left_out = lacks_stand_in && segment::ON_THE_STAND_IN.contains(&name);
            for case in spread.cases(provider, seed) {
                trials.push(trial(name, case, body).with_ignored_flag(is_left_out));
            }
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
