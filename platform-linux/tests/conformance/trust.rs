//! Who is let in: with a group key, those who have it.

use immwire::PeerState;

use crate::agent::{Ask, Say};
use crate::host::Setup;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] = &[("group_keys", Spread::ProcessesBothMotors, group_keys)];

fn group_keys(case: &Case) {
    let keys = [None, Some("one secret"), Some("another secret")];
    let with = |key: Option<&str>| Setup { key: key.map(str::to_owned), ..case.setup(1) };
    for ours in keys {
        for theirs in keys {
            let me = crate::host::Host::new(&with(ours));
            let mut other = case.bare_agent("other");
            let address = other.build(&with(theirs));
            let fits = ours == theirs;
            // In both directions.
            let called = me.try_peer(&address);
            assert_eq!(called.is_ok(), fits, "{ours:?} calls {theirs:?}: {called:?}");
            if called.is_err() {
                // Without a key it may have let us in, whom we then did not want: it sees that soon.
                let start = std::time::Instant::now();
                while other.ask(&me, Ask::Peers { count: 0 }) != Say::Peers(Vec::new()) {
                    assert!(start.elapsed() < crate::host::patience(), "{ours:?} {theirs:?}");
                }
            }
            let calling = other.ask(&me, Ask::TryPeer { address: me.engine.address().to_string() });
            assert_eq!(
                matches!(calling, Say::Peer(_)),
                fits,
                "{theirs:?} calls {ours:?}: {calling:?}"
            );
            if let Err(why) = called {
                assert!(why.contains("refused"), "{ours:?} {theirs:?}: {why}");
                // One that was let in by us, but did not want us, is gone in a moment.
                let none = || me.engine.peers().is_empty().then_some(());
                assert!(me.until(crate::host::patience(), none).is_some(), "{ours:?} {theirs:?}");
            } else {
                let states: Vec<_> =
                    me.engine.peers().iter().map(|peer| me.engine.peer_state(*peer)).collect();
                assert_eq!(states, [Some(PeerState::Up)]);
            }
        }
    }
}
