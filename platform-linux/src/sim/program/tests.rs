use super::*;

/// The same programs over shared memory, smaller: the only fault is an engine that goes away.
#[test]
fn programs_over_shared_memory_keep_the_contract() {
    let mut totals = Totals::default();
    for seed in 0..12 {
        let config = Config { engines: 2 + (seed % 3) as usize, ..Config::machine() };
        let operations = generate(seed, config.operations);
        let outcome = run(&mut MachineWorld::default(), &config, seed, &operations, false);
        assert_eq!(outcome.violation, None, "seed {seed}");
        totals.add(outcome.totals);
    }
    assert!(totals.operations > 500 && totals.ended > 200 && totals.messages > 10, "{totals:?}");
}

#[test]
fn shrinking_keeps_what_matters() {
    let operations = generate(7, 300);
    let (a, b) = (operations[17], operations[211]);
    let fails = |program: &[Operation]| program.contains(&a) && program.contains(&b);
    assert_eq!(shrink(&operations, 2000, fails, || false), [a, b]);
}

#[test]
fn shrinking_stops_between_two_tries_with_what_still_fails() {
    let operations = generate(7, 300);
    let matters = operations[17];
    for last in 0..12 {
        let (mut tries, mut asked) = (0, 0);
        let fails = |program: &[Operation]| {
            tries += 1;
            program.contains(&matters)
        };
        let stopped = || {
            asked += 1;
            asked > last
        };
        let kept = shrink(&operations, 2000, fails, stopped);
        assert!(kept.contains(&matters) && (kept.len() == 300) == (last == 0), "{last}");
        assert_eq!((tries, asked), (last, last + 1));
    }
}

#[test]
fn programs_on_a_fabric_keep_the_contract() {
    let mut totals = Totals::default();
    for seed in 0..10 {
        let outcome = run_on_fabric(seed, &operations(seed), false);
        assert_eq!(outcome.violation, None, "seed {seed}");
        totals.add(outcome.totals);
    }
    assert!(totals.operations > 1000 && totals.ended > 500 && totals.messages > 10, "{totals:?}");
}

/// Peers that nobody uses part, at about the time at which one is used again.
#[test]
fn programs_whose_peers_part_keep_the_contract() {
    let mut totals = Totals::default();
    for seed in (3..200).step_by(4) {
        let outcome = run_on_fabric(seed, &operations(seed), false);
        assert_eq!(outcome.violation, None, "seed {seed}");
        totals.add(outcome.totals);
    }
    assert!(totals.partings > 100 && totals.ended > 2000, "{totals:?}");
}

#[test]
fn the_same_seed_does_the_same() {
    for seed in [2, 3, 4] {
        let program = operations(seed);
        let once = run_on_fabric(seed, &program, true);
        assert_eq!(once, run_on_fabric(seed, &program, true));
        assert!(once.trace.len() > 100);
    }
}
