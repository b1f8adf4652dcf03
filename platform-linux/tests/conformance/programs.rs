//! Random programs of the simulated fabric's suite (`immwire::sim::program`), run over the provider: small ones,
//! whose only fault is an engine that goes away.

use std::time::{Duration, Instant};

use immwire::sim::program::{Config, MachineWorld, Manners, Totals, generate, run};

use crate::{Case, Provider, Spread, Test};

pub const TESTS: &[Test] = &[("programs", Spread::Once, programs)];

/// Where a connection is made at the first write, and every piece takes system calls.
fn slower(config: Config) -> Config {
    Config {
        drain: Duration::from_millis(50),
        news: Duration::from_millis(300),
        pass: Duration::from_millis(1),
        settle: Duration::from_millis(20),
        ..config
    }
}

fn programs(case: &Case) {
    let mut totals = Totals::default();
    for n in 0..12 {
        let seed = case.seed.wrapping_add(n);
        let (provider, setup) = (Provider::named(case.provider), case.setup(1));
        let config = Config { engines: 2 + (n % 3) as usize, ..Config::machine() };
        let config = if provider.facts.is_slow { slower(config) } else { config };
        let manners = Manners {
            refuses_softly: provider.facts.refuses_access_softly,
            flushes_at_the_receiver: provider.facts.flushes_at_the_receiver,
        };
        let mut world = MachineWorld::new(move || (provider.builder)(&setup), manners);
        let operations = generate(seed, config.operations);
        let began = Instant::now();
        let outcome = run(&mut world, &config, seed, &operations, true);
        // Whoever waits for somebody who has given up waits as long as for one who is silent.
        assert!(
            began.elapsed() < config.silence,
            "seed {seed}, the {n}th: took {:?}: {}",
            began.elapsed(),
            outcome.trace.join("\n"),
        );
        if let Some(violation) = outcome.violation {
            panic!("seed {seed}, the {n}th: {}\n{violation:?}", outcome.trace.join("\n"));
        }
        totals.add(outcome.totals);
    }
    // How many messages find a mailbox is the machine's affair: 7 were the fewest seen.
    assert!(totals.operations > 500 && totals.ended > 200 && totals.messages > 0, "{totals:?}");
}
