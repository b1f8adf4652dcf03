//! `immwire sim replay`: a fault program once more, step by step.
//!
//! Runs the program of a seed as `verification/faults` does, and says how it went; the programs and the
//! rules are those of `immwire::sim::program`.

use std::fmt::Write as _;

use immwire::sim::program::{Operation, Outcome, Totals, explain, operations, run_on_fabric};

use crate::args::SimReplayArgs;

/// Programs that a shrinking may run.
const TRIES: usize = 2000;

/// Runs the program; returns what there is to tell, and whether every rule was kept.
#[must_use]
pub fn replay(args: &SimReplayArgs) -> (String, bool) {
    let all = operations(args.seed);
    let chosen = choose(&all, args);
    let Outcome { totals, violation, trace } = run_on_fabric(args.seed, &chosen, args.trace);
    let mut text = String::new();
    // Writing to a string does not fail.
    for line in &trace {
        let _ = writeln!(text, "{line}");
    }
    let Totals { operations, events, ended, messages, partings } = totals;
    let _ = writeln!(
        text,
        "seed {}: {operations} of {} operations did something, {events} events, {ended} transfers ended, \
         {messages} messages came, {partings} partings",
        args.seed,
        chosen.len()
    );
    let Some(violation) = violation else {
        text.push_str("every rule was kept");
        return (text, true);
    };
    let at = violation.at.as_secs_f64() * 1e6;
    let _ = write!(
        text,
        "a rule was broken at operation {}, {at:.3} us: {}",
        violation.operation, violation.what
    );
    if chosen.len() == all.len()
        && !args.trace
        && let Some(failure) = explain(args.seed, TRIES)
    {
        let _ = write!(text, "\n\n{failure}");
    }
    (text, false)
}

/// The operations asked for: all, the first so many, or those at some places.
fn choose(all: &[Operation], args: &SimReplayArgs) -> Vec<Operation> {
    let first = args.steps.map_or(all, |steps| all.get(..steps).unwrap_or(all));
    if args.only.is_empty() {
        return first.to_vec();
    }
    args.only.iter().filter_map(|&at| first.get(at)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(seed: u64) -> SimReplayArgs {
        SimReplayArgs { seed, steps: None, only: Vec::new(), trace: false }
    }

    #[test]
    fn a_program_is_replayed_whole_in_part_and_with_a_trace() {
        let (whole, kept) = replay(&args(3));
        assert!(kept && whole.ends_with("every rule was kept"), "{whole}");
        let (traced, kept) = replay(&SimReplayArgs { trace: true, ..args(3) });
        assert!(kept && traced.ends_with(&whole) && traced.lines().count() > 100);
        let (part, kept) = replay(&SimReplayArgs { only: vec![0, 2], ..args(3) });
        assert!(kept && part.contains(" of 2 operations"), "{part}");
        let (part, kept) = replay(&SimReplayArgs { steps: Some(9), ..args(3) });
        assert!(kept && part.contains(" of 9 operations"), "{part}");
    }
}
