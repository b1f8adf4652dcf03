//! `immwire sim replay`: a fault program once more, step by step.
//!
//! Runs the program of a seed as `verification/faults` does, and says how it went; the programs and the
//! rules are those of `immwire::sim::program`.

use std::fmt::Write as _;

use immwire::sim::program::{Operation, Outcome, Totals, explain, operations, run_on_fabric};

use crate::args::SimReplayArgs;
use crate::signals;

/// Programs that a shrinking may run.
const TRIES: usize = 2000;

/// There is no such operation to run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no operation {place} to run: they are numbered from 0, and there are {operations}"
)]
pub struct NoOperation {
    /// The place that was named.
    place: usize,
    /// How many there are.
    operations: usize,
}

/// Runs the program; returns what there is to tell, and whether every rule was kept. After Ctrl-C a failing one is
/// shortened no more.
///
/// # Errors
///
/// [`NoOperation`]: nothing was run.
pub fn replay(args: &SimReplayArgs) -> Result<(String, bool), NoOperation> {
    let all = operations(args.seed);
    let chosen = choose(&all, args)?;
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
        return Ok((text, true));
    };
    let at = violation.at.as_secs_f64() * 1e6;
    let _ = write!(
        text,
        "a rule was broken at operation {}, {at:.3} us: {}",
        violation.operation, violation.what
    );
    if chosen.len() == all.len()
        && !args.trace
        && let Some(failure) = explain(args.seed, TRIES, signals::interrupted)
    {
        let _ = write!(text, "\n\n{failure}");
    }
    Ok((text, false))
}

/// The operations asked for: all, the first so many, or those at some places.
fn choose(all: &[Operation], args: &SimReplayArgs) -> Result<Vec<Operation>, NoOperation> {
    let first = args.steps.map_or(all, |steps| all.get(..steps).unwrap_or(all));
    if args.only.is_empty() {
        return Ok(first.to_vec());
    }
    let at = |&place: &usize| {
        first.get(place).copied().ok_or(NoOperation { place, operations: first.len() })
    };
    args.only.iter().map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(seed: u64) -> SimReplayArgs {
        SimReplayArgs { seed, steps: None, only: Vec::new(), trace: false }
    }

    #[test]
    fn a_program_is_replayed_whole_in_part_and_with_a_trace() {
        let (whole, kept) = replay(&args(3)).unwrap();
        assert!(kept && whole.ends_with("every rule was kept"), "{whole}");
        let (traced, kept) = replay(&SimReplayArgs { trace: true, ..args(3) }).unwrap();
        assert!(kept && traced.ends_with(&whole) && traced.lines().count() > 100);
        let (part, kept) = replay(&SimReplayArgs { only: vec![0, 2], ..args(3) }).unwrap();
        assert!(kept && part.contains(" of 2 operations"), "{part}");
        let (part, kept) = replay(&SimReplayArgs { steps: Some(9), ..args(3) }).unwrap();
        assert!(kept && part.contains(" of 9 operations"), "{part}");
    }

    #[test]
    fn operations_that_are_not_there_are_refused() {
        let count = operations(3).len();
        for (steps, place, operations) in
            [(None, count, count), (None, usize::MAX, count), (Some(9), 9, 9), (Some(0), 0, 0)]
        {
            let asked = SimReplayArgs { steps, only: vec![0, place], ..args(3) };
            let place = if operations == 0 { 0 } else { place };
            assert_eq!(replay(&asked), Err(NoOperation { place, operations }));
        }
    }
}
