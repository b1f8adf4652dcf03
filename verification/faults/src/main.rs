//! Runs programs of many seeds on the simulated fabric until so many steps are done, or a rule is broken.
//!
//!     faults SEED STEPS          programs of seed SEED: exit status 0, or 1 and the shortest failing program
//!     faults SEED STEPS quiet    the same, without shrinking
//!     faults SEED seconds N      as many as fit into N seconds
//!
//! A step is an operation or an event. The last line tells how many of each there were.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use immwire::sim::program::{Totals, explain, operations, run_on_fabric};

/// Programs that a shrinking may run.
const TRIES: usize = 2000;
/// Seeds of programs lie so far apart from one run's to the next.
const STRIDE: u64 = 1 << 32;

/// A program that takes longer hangs: others take a hundredth of a second.
const HANGS: Duration = Duration::from_secs(20);

/// When to end.
enum Until {
    Steps(u64),
    Time(Duration),
}

fn arguments() -> Option<(u64, Until, bool)> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *arguments.as_slice() {
        [seed, "seconds", seconds] => {
            let time = Duration::from_secs(seconds.parse().ok()?);
            Some((seed.parse().ok()?, Until::Time(time), false))
        }
        [seed, steps] => Some((seed.parse().ok()?, Until::Steps(steps.parse().ok()?), false)),
        [seed, steps, "quiet"] => {
            Some((seed.parse().ok()?, Until::Steps(steps.parse().ok()?), true))
        }
        _ => None,
    }
}

/// What the watchdog looks at.
#[derive(Default)]
struct Progress {
    /// The program under way.
    seed: AtomicU64,
    /// Done before it.
    steps: AtomicU64,
    /// It has failed, and is being shrunk.
    judged: AtomicBool,
}

impl Progress {
    /// Ends the process if one program goes on and on: nothing may hang.
    fn watch(&self) {
        let mut since = (Instant::now(), 0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let seed = self.seed.load(Ordering::Relaxed);
            if seed != since.1 {
                since = (Instant::now(), seed);
            }
            if since.0.elapsed() >= HANGS && !self.judged.load(Ordering::Relaxed) {
                let steps = self.steps.load(Ordering::Relaxed);
                println!("violation after {steps} steps, seed {seed}: an engine's step never ends");
                std::process::exit(1);
            }
        }
    }
}

fn main() -> ExitCode {
    let Some((seed, until, quiet)) = arguments() else {
        eprintln!("faults SEED STEPS [quiet] | faults SEED seconds N");
        return ExitCode::from(2);
    };
    // A panic of the engine is a violation, and told as one.
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let (mut totals, mut programs) = (Totals::default(), 0);
    let first = seed.wrapping_mul(STRIDE);
    let done = Arc::new(Progress::default());
    let watched = Arc::clone(&done);
    std::thread::spawn(move || watched.watch());
    loop {
        let over = match until {
            Until::Steps(steps) => totals.steps() >= steps,
            Until::Time(time) => start.elapsed() >= time,
        };
        if over {
            break;
        }
        let seed = first.wrapping_add(programs);
        programs += 1;
        done.steps.store(totals.steps(), Ordering::Relaxed);
        done.seed.store(seed, Ordering::Relaxed);
        let outcome = run_on_fabric(seed, &operations(seed), false);
        totals.add(outcome.totals);
        if let Some(violation) = outcome.violation {
            done.judged.store(true, Ordering::Relaxed);
            println!("violation after {} steps, seed {seed}: {}", totals.steps(), violation.what);
            if !quiet {
                match explain(seed, TRIES, || false) {
                    Some(failure) => println!("{failure}"),
                    None => println!("it does not come again: the run is not deterministic"),
                }
            }
            return ExitCode::FAILURE;
        }
    }
    let Totals { operations, events, ended, messages, partings } = totals;
    println!(
        "seed {seed}: {} steps ({operations} operations, {events} events) in {programs} programs, \
         {ended} transfers ended, {messages} messages, {partings} partings, 0 violations, {:.1} s",
        totals.steps(),
        start.elapsed().as_secs_f64()
    );
    ExitCode::SUCCESS
}
