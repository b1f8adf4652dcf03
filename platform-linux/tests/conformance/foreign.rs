//! Memory that the application has registered itself, by every way there is to it.

use std::time::{Duration, Instant};

use immwire::{DownReason, End, PagedWrite, Pages, PeerId, PeerState, Rights};

use crate::agent::{Agent, Ask};
use crate::host::{Foreign, Host, Lent, Own, patience, poison};
use crate::operations::write;
use crate::staged::is_staged;
use crate::stalls::Stalls;
use crate::{Case, Spread, Test};

pub const TESTS: &[Test] =
    &[("rights", Spread::Processes, rights), ("one_registration", Spread::Once, one_registration)];

/// Where there are several ways to the same memory.
pub const CHOSEN_WAYS: &[Test] = &[
    ("by_the_kernel", Spread::Threads, |case| registered_memory(case, Foreign::Kernel)),
    ("by_bouncing", Spread::Threads, |case| registered_memory(case, Foreign::Bounce)),
    ("by_the_kernel_polled", Spread::ProcessesBothMotors, |case| {
        registered_memory(case, Foreign::Kernel);
    }),
    ("by_bouncing_polled", Spread::ProcessesBothMotors, |case| {
        registered_memory(case, Foreign::Bounce);
    }),
];

/// Where there is one.
pub const ONE_WAY: &[Test] = &[
    ("registered_memory", Spread::Threads, |case| registered_memory(case, Foreign::Auto)),
    ("registered_memory_polled", Spread::ProcessesBothMotors, |case| {
        registered_memory(case, Foreign::Auto);
    }),
];

/// Both sides, of which ours writes to registered memory in the given way.
pub fn pair(case: &Case, foreign: Foreign) -> (Host, Agent, PeerId) {
    let me = Host::new(&crate::host::Setup { foreign, ..case.setup(case.nics.0) });
    let (agent, address) = case.agent("other");
    let peer = me.peer(&address);
    (me, agent, peer)
}

fn registered_memory(case: &Case, foreign: Foreign) {
    let (me, mut other, peer) = pair(case, foreign);
    let size = 5 << 20;
    let src = me.memory(size, Own::Test);
    let (there, desc) = other.memory(&me, size, Own::Test);
    let (counter, tag) = other.counter(&me);
    for (n, len) in
        [0, 1, 63, 65, 4097, 65_535, 65_537, (1 << 20) + 1, (4 << 20) + 3].into_iter().enumerate()
    {
        let pattern = case.pattern(n as u64);
        pattern.fill(&src, 5, len, 0);
        other.tell(&me, Ask::Poison { region: there, offset: 0, len: size, byte: 0x77 });
        let transfer = write(&me, peer, &src, &desc, (5, 9, len), Some(tag));
        other.count(&me, counter, 1);
        other.check(&me, there, 9, len, pattern);
        other.check_only(&me, there, 0, 9, 0x77);
        other.check_only(&me, there, 9 + len, size - 9 - len, 0x77);
        me.done(&transfer);
        let again = case.pattern(100 + n as u64);
        again.fill(&src, 5, len, 0);
        me.done(&write(&me, peer, &src, &desc, (5, 9, len), None));
        other.check(&me, there, 9, len, again);
    }
    let pages = 1000_u32;
    let pattern = case.pattern(200);
    pattern.fill(&src, 0, u64::from(pages) * 4096, 0);
    let (mut from, to): (Vec<u32>, Vec<u32>) = (0..pages).map(|page| (page, page)).unzip();
    case.random().shuffle(&mut from);
    let list = |list: &[u32]| Pages { indices: list.into(), stride: 4096, offset: 0 };
    let transfer = me.engine.submit_paged_writes(&PagedWrite {
        peer,
        page_bytes: 4096,
        src: &src,
        src_pages: list(&from),
        dst: &desc,
        dst_pages: list(&to),
        imm: Some(tag),
    });
    other.count(&me, counter, pages.into());
    me.done(&transfer.expect("submit"));
    let wrong = other.place(&me, Ask::MismatchedPage { region: there, pages: from, pattern });
    assert_eq!(wrong, None, "the first page that is wrong");
    assert_eq!(other.number(&me, Ask::Available { counter }), 0);
}

/// Memory that was registered for local use only is not written, whatever a peer says.
fn rights(case: &Case) {
    let ways = case.facts().ways.iter().filter(|(_, own)| *own == Own::Test);
    for &(foreign, _) in ways {
        let (me, mut other, mut peer) = pair(case, foreign);
        let src = me.memory(4096, Own::Engine);
        let (_, desc) = other.memory(&me, 4096, Own::Test);
        // As `desc` says of itself: refused here.
        let local = immwire::MrDesc { rights: Rights::LOCAL, ..desc };
        let refused = me.engine.submit_single_write(&immwire::SingleWrite {
            peer,
            src: &src,
            src_offset: 0,
            dst: &local,
            dst_offset: 0,
            len: 1,
            imm: None,
        });
        assert!(refused.is_err());
        // A descriptor that claims more bytes than the region has: refused there, and nobody is hurt.
        let longer = immwire::MrDesc { len: 1 << 20, ..desc };
        let end = me.end(&write(&me, peer, &src, &longer, (0, 4095, 2), None));
        assert!(matches!(end, End::Quiesced { .. }), "{foreign:?} {end:?}");
        if !case.facts().refuses_access_softly && !is_staged(&desc) {
            peer = lost_and_back(case, &me, &mut other, peer);
        }
        me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), None));
        // One that claims a right which the region was not registered with: refused there, too, and not a byte is written.
        poison(&src, 0, 4096, 0x11);
        let (private, its) = other.private_memory(&me, 4096);
        other.tell(&me, Ask::Poison { region: private, offset: 0, len: 4096, byte: 0x5c });
        assert_eq!(its.rights, Rights::LOCAL);
        let claimed = immwire::MrDesc { rights: Rights::REMOTE_WRITE, ..its };
        let end = me.end(&write(&me, peer, &src, &claimed, (0, 0, 4096), None));
        assert!(matches!(end, End::Quiesced { .. }), "{foreign:?} {end:?}");
        if !case.facts().refuses_access_softly && !is_staged(&its) {
            peer = lost_and_back(case, &me, &mut other, peer);
        }
        // Nor does any of it come later: what was written after it has come.
        me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), None));
        other.check_only(&me, private, 0, 4096, 0x5c);
        if case.facts().refuses_access_softly {
            // More often than a peer grants room: what is refused takes none of it, nor is it counted.
            let (counter, tag) = other.counter(&me);
            for _ in 0..600 {
                let end = me.end(&write(&me, peer, &src, &longer, (0, 4095, 2), Some(tag)));
                assert!(matches!(end, End::Quiesced { .. }), "{foreign:?} {end:?}");
            }
            me.done(&write(&me, peer, &src, &desc, (0, 0, 4096), Some(tag)));
            other.count(&me, counter, 1);
            assert_eq!(other.number(&me, Ask::Available { counter }), 0, "{foreign:?}");
        }
    }
}

/// The peer is lost by what was just refused, at both ends; it is called again.
pub fn lost_and_back(case: &Case, me: &Host, other: &mut Agent, peer: PeerId) -> PeerId {
    let state = me.peer_down(peer, case.soon());
    assert!(matches!(state, Some(PeerState::Down(DownReason::Disconnected))), "{state:?}");
    // It may not know yet: then its call finds the old connection, which may end just then.
    let (stalls, start) = (Stalls::watch(), Instant::now());
    while me.engine.peers().is_empty() && stalls.beyond(start, case.soon()).is_none() {
        other.ask(me, Ask::TryPeer { address: me.engine.address().to_string() });
        me.linger(Duration::from_millis(1));
    }
    let peers = me.engine.peers();
    assert!(peers.len() == 1 && peers[0] != peer, "{peers:?}");
    peers[0]
}

/// Registering inside what is registered gives another handle to the same registration.
fn one_registration(case: &Case) {
    let me = case.me();
    let lent = Lent::new(1 << 20);
    // SAFETY: never unmapped, and no reference to it is made.
    let register = |offset: usize, len| unsafe {
        me.engine.register(lent.ptr.add(offset), len, Rights::REMOTE_WRITE).expect("register")
    };
    let whole = register(0, 1 << 20);
    let part = register(4096, 100);
    let (all, some) = (whole.desc(), part.desc());
    assert_eq!((some.keys, some.generation), (all.keys, all.generation));
    assert_eq!((some.base, some.len), (all.base + 4096, 100));
    let (limit, soon) = (Duration::from_millis(10), Duration::from_millis(100));
    let whole = match whole.close(limit) {
        Err(immwire::CloseError::InUse { region }) => region,
        other => panic!("{other:?}"),
    };
    drop(part);
    let (stalls, start) = (Stalls::watch(), Instant::now());
    whole.close(patience()).expect("the last handle");
    assert_eq!(stalls.beyond(start, soon), None);
    let again = register(0, 1 << 20);
    assert_ne!(again.desc().keys, all.keys);
}
