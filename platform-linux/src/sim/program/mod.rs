//! Random programs under faults, held to an oracle: whether engines keep the contract.
//!
//! A program is made from a seed: a few engines write to each other in every way there is, cancel, miss
//! deadlines, retire counters, withdraw regions, leave and return, while NICs and links are lost and
//! engines die. After every event an oracle that shares no code with the engine looks at what can be
//! seen from outside:
//!
//! | clause | what is required |
//! |---|---|
//! | transport, bounds | no byte changes but where a transfer under way was asked to write it, and to what it was asked to |
//! | counting | a counter has seen no more than was sent to it, and no less than what was done; when it has seen all, all bytes are there |
//! | ends | each transfer ends once, for a reason that exists; done: all is written; never started: nothing; and what is there then stays, though the source is written over at once |
//! | time | what was stopped ends within its drain; waits end when enough has come; one that ends without names who sent what |
//! | peers | messages come once, in order; engines between which nothing went wrong stay connected, or part where they do not use each other: then nothing was under way, and what was done counts; at the end everybody finds together again, and a fresh batch fills every place |
//!
//! A program that breaks a rule is shrunk to the operations that matter. What it does not see: what
//! threads do to each other (programs have one), and faults that its world does not have.
//!
//! # Invariants
//!
//! In a world whose time is virtual the same seed, configuration and operations do the same.

mod fabric;
mod judge;
mod ledger;
mod memory;
mod operation;
mod run;
mod shrink;
mod side;
#[cfg(test)]
mod tests;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use operation::Numbers;
use run::Program;

pub use fabric::FabricWorld;
pub use operation::{Kind, Operation, generate};
pub use shrink::shrink;
pub use world::{Fault, MachineWorld, Manners, World};

/// The size of programs and of their engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Operations of one program.
    pub operations: usize,
    /// Engines at a time, 2 or more.
    pub engines: usize,
    /// NICs of an engine at most; each has some number from 1.
    pub nics: u8,
    /// Windows of an engine that peers write to; every second is memory of the program's own.
    pub windows: usize,
    /// Bytes of each window.
    pub window_bytes: usize,
    /// Bytes of a contiguous write at most.
    pub write_bytes: u64,
    /// Bytes of a page at most.
    pub page_bytes: u64,
    /// Pages of a write at most.
    pub pages: u64,
    /// Counters of an engine.
    pub counters: u16,
    /// Transfers of an engine at a time.
    pub transfers: u16,
    /// Peers of an engine at a time.
    pub peers: u16,
    /// Slots of a mailbox.
    pub mailbox_slots: u8,
    /// Bytes of a slot.
    pub mailbox_slot_bytes: u32,
    /// Writes up to this size go first.
    pub latency_bytes: u64,
    /// How long a stopped transfer may take to complete before it is forced.
    pub drain: Duration,
    /// A peer that is silent for so long is lost.
    pub silence: Duration,
    /// A peer that nobody has used for so long is let go.
    pub idle_after: Duration,
    /// What goes wrong is known to everybody concerned, and dealt with, after this.
    pub news: Duration,
    /// The longest time between two operations, and the longest deadline.
    pub pass: Duration,
    /// Everything that is on its way arrives within this, if nothing is wrong.
    pub settle: Duration,
    /// What an engine may be late by, for looking at its clock now and then.
    pub slack: Duration,
}

impl Config {
    /// For a world of virtual time whose NICs take pieces of some hundred bytes: small and quick.
    #[must_use]
    pub const fn small() -> Self {
        Self {
            operations: 400,
            engines: 4,
            nics: 4,
            windows: 2,
            window_bytes: 8 << 10,
            write_bytes: 2 << 10,
            page_bytes: 128,
            pages: 300,
            counters: 4,
            transfers: 16,
            peers: 8,
            mailbox_slots: 2,
            mailbox_slot_bytes: 256,
            latency_bytes: 64,
            drain: Duration::from_millis(1),
            silence: Duration::from_millis(16),
            idle_after: Duration::MAX,
            news: Duration::from_millis(32),
            pass: Duration::from_micros(200),
            settle: Duration::from_millis(2),
            slack: Duration::from_micros(30),
        }
    }

    /// For a [`MachineWorld`], where pieces are large and time is the machine's.
    #[must_use]
    pub const fn machine() -> Self {
        Self {
            operations: 150,
            window_bytes: 512 << 10,
            write_bytes: 300 << 10,
            page_bytes: 4 << 10,
            drain: Duration::from_millis(5),
            // Nobody is lost for being slow.
            silence: Duration::from_secs(60),
            news: Duration::from_millis(100),
            pass: Duration::from_micros(100),
            settle: Duration::from_millis(2),
            ..Self::small()
        }
    }

    /// How long the end of everything may take.
    pub(crate) fn patience(&self) -> Duration {
        (self.silence + self.drain) * 4
    }
}

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Operations that did something.
    pub operations: u64,
    /// Events that were let happen.
    pub events: u64,
    /// Transfers that ended.
    pub ended: u64,
    /// Messages that came.
    pub messages: u64,
    /// Connections that one of their ends found ended by agreement.
    pub partings: u64,
}

impl Totals {
    /// Operations and events.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.operations + self.events
    }

    /// Adds another program's.
    pub const fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.events += other.events;
        self.ended += other.ended;
        self.messages += other.messages;
        self.partings += other.partings;
    }
}

/// A rule that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The operation after which it was seen; as many as there are, at the program's end.
    pub operation: usize,
    /// When, in the world's time.
    pub at: Duration,
    /// What was seen, and what should have been.
    pub what: String,
}

/// How a program went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// What was done until the end, or the violation.
    pub totals: Totals,
    /// The rule that was broken, if one was.
    pub violation: Option<Violation>,
    /// What happened, a line each, if that was wanted.
    pub trace: Vec<String>,
}

/// Runs operations in a world of its own, as many engines as `config` says.
///
/// The seed decides what is not an operation's: how many NICs each engine has, and how much happens
/// between operations. A panic in the engine is a violation.
pub fn run<W: World>(
    world: &mut W,
    config: &Config,
    seed: u64,
    operations: &[Operation],
    traced: bool,
) -> Outcome {
    let mut program = Program::new(world, config.clone(), traced);
    let mut reached = 0;
    let ran = catch_unwind(AssertUnwindSafe(|| program.run(seed, operations, &mut reached)));
    let what = match ran {
        Ok(checked) => checked.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text =
                text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Some(format!("the engine panicked: {text}"))
        }
    };
    let at = program.world.now();
    let violation = what.map(|what| Violation { operation: reached, at, what });
    if violation.is_some() {
        // What the world knows of the last moments.
        program.say(|| "the rule is broken".into());
    }
    let outcome = Outcome {
        totals: program.totals,
        violation,
        trace: program.lines.take().unwrap_or_default(),
    };
    program.end();
    outcome
}

/// The configuration that goes with a seed: how many engines, how many operations, and whether peers that are not used are let go.
#[must_use]
pub fn configuration(seed: u64) -> Config {
    let mut numbers = Numbers::new(seed.rotate_left(32));
    let engines = 2 + numbers.index(4);
    let operations = 250 << numbers.index(4);
    let drain = Duration::from_micros([700, 1000, 2000][numbers.index(3)]);
    let small = Config::small();
    // As often as heartbeats go, or half as often.
    let idle_after = match seed % 8 {
        3 => small.silence / 8,
        7 => small.silence / 4,
        _ => small.idle_after,
    };
    Config { engines, operations, drain, idle_after, ..small }
}

/// Runs the program of `seed` on a simulated fabric of the same seed, or only these `operations`.
#[must_use]
pub fn run_on_fabric(seed: u64, operations: &[Operation], traced: bool) -> Outcome {
    let mut world = FabricWorld::new(seed, traced);
    run(&mut world, &configuration(seed), seed, operations, traced)
}

/// The operations of the program of `seed`.
#[must_use]
pub fn operations(seed: u64) -> Vec<Operation> {
    generate(seed, configuration(seed).operations)
}

/// A program that breaks a rule, as short as it was found.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// Operations that it was made of.
    pub operations: usize,
    /// Those that matter, by their place in the program.
    pub kept: Vec<usize>,
    /// The rule that the program broke.
    pub violation: Violation,
    /// How what is left of it goes.
    pub shortest: Outcome,
}

/// Shrinks the failing program of `seed`, running at most `tries` others, and no more once `stopped`, which is asked
/// before each; `None`: it does not fail.
#[must_use]
pub fn explain(seed: u64, tries: usize, stopped: impl FnMut() -> bool) -> Option<Failure> {
    let program = operations(seed);
    let violation = run_on_fabric(seed, &program, false).violation?;
    // What comes after has no part in it.
    let reached = program.get(..=violation.operation).unwrap_or(&program);
    let fails = |program: &[Operation]| run_on_fabric(seed, program, false).violation.is_some();
    let start = if fails(reached) { reached } else { &program };
    let short = shrink(start, tries, fails, stopped);
    let shortest = run_on_fabric(seed, &short, true);
    // Every operation has a number of its own, so that each is found where it stands.
    let place = |operation| program.iter().position(|other| other == operation);
    let kept = short.iter().filter_map(place).collect();
    Some(Failure { seed, operations: program.len(), kept, violation, shortest })
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, operations, kept, violation, shortest } = self;
        writeln!(
            f,
            "seed {seed}, operation {} of {operations}: {}",
            violation.operation, violation.what
        )?;
        writeln!(f, "{} operations suffice: {kept:?}", kept.len())?;
        for line in &shortest.trace {
            writeln!(f, "{line}")?;
        }
        if let Some(violation) = &shortest.violation {
            writeln!(f, "there: {}", violation.what)?;
        }
        write!(f, "replay it: immwire sim replay {seed} --trace")
    }
}

impl<W: World> Program<'_, W> {
    fn run(&mut self, seed: u64, operations: &[Operation], reached: &mut usize) -> memory::Check {
        let mut numbers = Numbers::new(!seed);
        for at in 0..self.config.engines {
            let nics = self.some_nics(&mut numbers);
            self.start(at, nics)?;
        }
        for (at, operation) in operations.iter().enumerate() {
            *reached = at;
            // The number of an operation decides what comes after it, too: dropping others changes nothing.
            let mut between = Numbers::new(!operation.number);
            if self.execute(*operation)? {
                self.totals.operations += 1;
            }
            let events = between.below(between.clone().below(12) + 1);
            self.events(events)?;
            if at % 16 == 0 {
                self.sweep()?;
            }
        }
        *reached = operations.len();
        self.conclude()
    }

    /// Engines first, then the memory that they were given.
    fn end(self) {
        for at in 0..self.sides.len() {
            self.world.stop(at);
        }
        let Self { mut sides, mut graves, flights, .. } = self;
        drop(flights);
        for side in sides.iter_mut().flatten().chain(&mut graves) {
            side.counters.clear();
        }
    }
}
