//! Taking memory back while peers write to it.

use std::time::{Duration, Instant};

use immwire::CloseError;

use crate::agent::{Ask, Say};
use crate::ends::{flood, still};
use crate::host::{Own, Setup, patience};
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[
    ("close_under_writes", Spread::Threads, close_under_writes),
    ("close_under_writes_polled", Spread::ProcessesBothMotors, close_under_writes),
    ("drop_under_writes", Spread::Places, drop_under_writes),
];

/// Within it a region is closed that a peer writes to, while processors run.
const SOON: Duration = Duration::from_secs(1);

/// A peer writes without end; once the region is closed, it does not, and its writes fail.
fn close_under_writes(case: &Case) {
    let stalls = Stalls::watch();
    for &(foreign, own) in case.facts().ways {
        let me = case.me();
        let mut other = case.bare_agent("flooding");
        let address = other.build(&Setup { foreign, ..case.setup(case.nics.1) });
        let peer = me.peer(&address);
        for round in 0..5 {
            // A region of its own for each round; in the space of the last one, if that is ours.
            let mine = me.memory(1 << 20, own);
            flood(&me, &mut other, &mine);
            let start = Instant::now();
            let patience = Duration::from_secs(5);
            let closed = match own {
                Own::Engine => me.close(mine.region, patience).map(|()| None),
                // The same bytes, as nobody but us knows them now.
                Own::Test => me.reclaim(mine, patience).map(Some),
            };
            let again = closed.unwrap_or_else(|error| panic!("{foreign:?} {round}: {error}"));
            assert_eq!(stalls.beyond(start, SOON), None, "{foreign:?} {round}");
            if let Some(again) = again {
                still(&me, &again);
            }
            // Whose memory it is is not asked: it is nobody's to write to any more.
            let failed = other.flood_failed(&me);
            let writes = other.number(&me, Ask::Stop);
            eprintln!("    {foreign:?} {round}: {writes} writes, then {failed}");
            assert_eq!(me.stands(peer), Some(immwire::PeerState::Up), "{foreign:?}");
        }
    }
}

/// Dropping does the same, later; nothing breaks, and a new region is not hit.
fn drop_under_writes(case: &Case) {
    for &(foreign, own) in case.facts().ways {
        let me = case.me();
        let mut other = case.bare_agent("flooding");
        let address = other.build(&Setup { foreign, ..case.setup(case.nics.1) });
        let peer = me.peer(&address);
        for _ in 0..10 {
            let mine = me.memory(1 << 20, own);
            flood(&me, &mut other, &mine);
            let other_handle = mine.region.clone();
            let mine = match mine.region.close(Duration::from_millis(1)) {
                Err(CloseError::InUse { region }) => region,
                other => panic!("{other:?}"),
            };
            drop((mine, other_handle));
            let next = me.memory(1 << 20, own);
            still(&me, &next);
            other.flood_failed(&me);
            assert!(matches!(other.ask(&me, Ask::Stop), Say::Number(_)));
        }
        assert_eq!(me.stands(peer), Some(immwire::PeerState::Up), "{foreign:?}");
        let (counter, tag) = other.counter(&me);
        let transfer = me.engine.submit_imm(peer, tag, 1).expect("submit");
        assert_eq!(me.end_within(&transfer, patience()), Some(immwire::End::Done));
        other.count(&me, counter, 1);
    }
}
