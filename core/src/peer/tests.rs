use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn at(n: u64) -> Time {
    Time::ZERO.after(ms(n))
}

/// In milliseconds.
#[derive(Clone, Copy)]
struct Limits {
    heartbeat: u64,
    asked: u64,
    suspect: u64,
    down: u64,
    connect: u64,
    idle: u64,
}

const FOREVER: u64 = u64::MAX;

impl Limits {
    fn config(self) -> LivenessConfig {
        let limit = |n| if n == FOREVER { Duration::MAX } else { ms(n) };
        LivenessConfig {
            heartbeat: ms(self.heartbeat),
            suspect_after: limit(self.suspect),
            down_after: limit(self.down),
            connect_deadline: limit(self.connect),
            idle_after: limit(self.idle),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Connected,
    Heard,
    Used,
    Stays,
    Sent,
    Timeout,
    Disconnected,
    Close,
}

const EVENTS: [Event; 8] = [
    Event::Connected,
    Event::Heard,
    Event::Used,
    Event::Stays,
    Event::Sent,
    Event::Timeout,
    Event::Disconnected,
    Event::Close,
];

fn apply(peer: &mut Peer, limits: Limits, event: Event, now: u64) {
    match event {
        Event::Connected => peer.handle_connected(ms(limits.asked), at(now)),
        Event::Heard => peer.handle_heard(at(now)),
        Event::Used => peer.handle_used(at(now)),
        Event::Stays => {
            let answers = peer.parting().is_some_and(|round| peer.handle_stays(at(now), round));
            assert!(answers || !peer.handle_stays(at(now), 1));
        }
        Event::Sent => peer.handle_sent(at(now)),
        Event::Timeout => peer.handle_timeout(at(now)),
        Event::Disconnected => peer.handle_disconnected(DownReason::Disconnected),
        Event::Close => peer.close(DownReason::Removed),
    }
}

/// What follows from the record of events, each with its instant; nothing happened after a loss.
fn state_by_record(limits: Limits, record: &[(Event, u64)]) -> PeerState {
    let connected = record.iter().position(|(event, _)| *event == Event::Connected);
    let mut suspect = false;
    for (index, (event, now)) in record.iter().enumerate() {
        let answered = connected.filter(|first| *first < index);
        // When this had happened last before it; the answer is the first time of either.
        let since = answered.map(|first| &record[first..index]);
        let last = |what| {
            let signs = since?;
            let last = signs.iter().rev().find(|(event, _)| *event == what);
            last.or(signs.first()).map(|(_, when)| *when)
        };
        let last = last(Event::Heard);
        match (event, last) {
            (Event::Disconnected, _) => {
                let asked = parting_by_record(limits, &record[..index]);
                let agreed = if asked { DownReason::Idle } else { DownReason::Disconnected };
                return PeerState::Down(agreed);
            }
            (Event::Close, _) => return PeerState::Down(DownReason::Removed),
            (Event::Timeout, None) if *now >= limits.connect => {
                return PeerState::Down(DownReason::NeverAnswered);
            }
            (Event::Timeout, Some(last)) if now - last >= limits.down => {
                return PeerState::Down(DownReason::Silent { for_ms: limits.down });
            }
            (Event::Timeout, Some(last)) if now - last >= limits.suspect => suspect = true,
            (Event::Heard, Some(_)) => suspect = false,
            _ => {}
        }
    }
    match (connected, suspect) {
        (None, _) => PeerState::Connecting,
        (Some(_), false) => PeerState::Up,
        (Some(_), true) => PeerState::Suspect,
    }
}

/// Whether the peer is asked to part, by what follows from the record, in which it was not lost.
fn parting_by_record(limits: Limits, record: &[(Event, u64)]) -> bool {
    let idle = limits.idle.max(limits.heartbeat).max(1);
    let Some(first) = record.iter().position(|(event, _)| *event == Event::Connected) else {
        return false;
    };
    let (mut used, mut asked) = (record[first].1, false);
    for (event, now) in &record[first + 1..] {
        match event {
            Event::Used => used = *now,
            Event::Stays if asked => (used, asked) = (*now, false),
            Event::Timeout => asked |= *now >= used.saturating_add(idle),
            _ => {}
        }
    }
    asked
}

/// Whether the last event of the record asks for a heartbeat: a whole interval has passed since the
/// last sending that no earlier time-out has seen.
fn heartbeat_by_record(limits: Limits, record: &[(Event, u64)]) -> bool {
    let Some(((Event::Timeout, now), before)) = record.split_last() else {
        return false;
    };
    let Some(connected) = before.iter().position(|(event, _)| *event == Event::Connected) else {
        return false;
    };
    let sent = before.iter().rposition(|(event, _)| *event == Event::Sent);
    let from = sent.map_or(connected, |sent| sent.max(connected));
    let interval = limits.heartbeat.min(limits.asked).max(1);
    let start = before[from].1;
    let whole = |now: u64| (now - start) / interval;
    let seen = before[from..].iter().filter(|(event, _)| *event == Event::Timeout);
    whole(*now) > seen.map(|(_, when)| whole(*when)).max().unwrap_or(0)
}

struct Walk {
    limits: Limits,
    depth: usize,
    record: Vec<(Event, u64)>,
    nodes: u64,
    lost: u64,
    suspected: u64,
    idle: u64,
}

impl Walk {
    fn run(limits: Limits, depth: usize) -> Self {
        let mut walk =
            Self { limits, depth, record: Vec::new(), nodes: 0, lost: 0, suspected: 0, idle: 0 };
        walk.visit(Peer::new(limits.config(), at(0)), 0);
        walk
    }

    /// `peer` is what the record led to at `now`, with every action polled.
    fn visit(&mut self, peer: Peer, now: u64) {
        self.nodes += 1;
        self.check_timeouts(peer, now);
        if matches!(peer.state(), PeerState::Down(_)) {
            self.lost += 1;
            let idle = peer.state() == PeerState::Down(DownReason::Idle);
            self.idle += u64::from(idle);
            return Self::check_final(peer, self.limits, now);
        }
        if self.record.len() == self.depth {
            return;
        }
        for wait in [0, 1, 3] {
            for event in EVENTS {
                let (mut next, then) = (peer, now + wait);
                apply(&mut next, self.limits, event, then);
                self.record.push((event, then));
                self.check_step(peer.state(), &mut next, event);
                self.visit(next, then);
                self.record.pop();
            }
        }
    }

    fn check_step(&mut self, before: PeerState, peer: &mut Peer, event: Event) {
        let record = &self.record;
        let state = state_by_record(self.limits, record);
        assert_eq!(peer.state(), state, "{record:?}");
        let down = matches!(state, PeerState::Down(_));
        let mut expected = Vec::new();
        if down && event != Event::Disconnected {
            expected.push(Action::Disconnect);
        }
        if before != state {
            expected.push(Action::Report(state));
        }
        let asked = |record| parting_by_record(self.limits, record);
        let asks = asked(record) && !asked(&record[..record.len() - 1]);
        assert_eq!(peer.parting().is_some(), !down && asked(record), "{record:?}");
        if !down && (asks || heartbeat_by_record(self.limits, record)) {
            expected.push(Action::SendHeartbeat);
        }
        let actions: Vec<Action> = core::iter::from_fn(|| peer.poll_action()).take(9).collect();
        assert_eq!(actions, expected, "{record:?}");
        if before == PeerState::Up && state == PeerState::Suspect {
            self.suspected += 1;
        }
    }

    /// The time announced is the first that changes anything, and it lies ahead after each time-out;
    /// being late changes nothing.
    fn check_timeouts(&self, peer: Peer, now: u64) {
        let after = |times: &[u64]| {
            let mut peer = peer;
            times.iter().for_each(|time| peer.handle_timeout(at(*time)));
            peer
        };
        let next = peer.next_timeout();
        for time in now..now + 8 {
            let then = after(&[time]);
            assert_eq!(then != peer, at(time) >= next, "{:?} {time} {next:?}", self.record);
            assert!(then.next_timeout() > at(time), "{:?} {time}", self.record);
            for early in now..time {
                assert_eq!(after(&[early, time]), then, "{:?} {early} {time}", self.record);
            }
        }
        let endless = matches!(peer.state(), PeerState::Down(_))
            || (peer.state() == PeerState::Connecting && self.limits.connect == FOREVER);
        assert_eq!(next == Time::NEVER, endless, "{:?}", self.record);
    }

    /// No event changes a lost peer in anything; so nothing ever will.
    fn check_final(peer: Peer, limits: Limits, now: u64) {
        for event in EVENTS {
            let mut next = peer;
            apply(&mut next, limits, event, now + 9);
            assert_eq!(next, peer, "{event:?}");
            assert_eq!(next.poll_action(), None);
        }
    }
}

#[test]
fn every_sequence_of_events_agrees_with_its_record() {
    let limits = Limits { heartbeat: 2, asked: 9, suspect: 2, down: 4, connect: 3, idle: FOREVER };
    for idle in [FOREVER, 3] {
        let walk = Walk::run(Limits { idle, ..limits }, 5);
        assert!(walk.nodes > 100_000 && walk.lost > 10_000 && walk.suspected > 1_000);
        assert_eq!(walk.idle > 1_000, idle == 3, "{}", walk.idle);
    }
}

#[test]
fn other_limits_agree_too() {
    let limits = Limits { heartbeat: 9, asked: 2, suspect: 2, down: 4, connect: 3, idle: FOREVER };
    let cases = [
        limits,
        Limits { suspect: FOREVER, ..limits },
        Limits { down: FOREVER, ..limits },
        Limits { down: FOREVER, suspect: FOREVER, ..limits },
        Limits { connect: FOREVER, ..limits },
        Limits { suspect: 5, ..limits }, // Lost before it is suspected.
        Limits { heartbeat: 0, asked: 0, ..limits }, // Taken for one millisecond.
        Limits { idle: 1, ..limits },    // Before it is suspected.
        Limits { idle: 4, ..limits },    // As it is lost.
        Limits { idle: 5, down: FOREVER, ..limits },
        Limits { idle: 0, ..limits },
    ];
    for limits in cases {
        let walk = Walk::run(limits, 3);
        assert!(walk.nodes > 1_000);
        assert_eq!(walk.suspected > 0, limits.suspect < limits.down && limits.suspect <= 3);
    }
}

/// The path on which a peer comes, is suspected, recovers and is lost.
#[test]
fn the_whole_life_is_reported_in_order() {
    let config =
        Limits { heartbeat: 9, asked: 9, suspect: 2, down: 4, connect: 3, idle: FOREVER }.config();
    let mut peer = Peer::new(config, at(0));
    let mut reports = Vec::new();
    let mut step = |f: &dyn Fn(&mut Peer)| {
        f(&mut peer);
        while let Some(action) = peer.poll_action() {
            reports.push(action);
        }
    };
    step(&|peer| peer.handle_connected(ms(9), at(1)));
    step(&|peer| peer.handle_timeout(at(3)));
    step(&|peer| peer.handle_heard(at(4)));
    step(&|peer| peer.handle_timeout(at(6)));
    step(&|peer| peer.handle_timeout(at(8)));
    step(&|peer| peer.handle_heard(at(9)));
    let lost = PeerState::Down(DownReason::Silent { for_ms: 4 });
    let states = [PeerState::Up, PeerState::Suspect, PeerState::Up, PeerState::Suspect];
    let mut expected: Vec<_> = states.map(Action::Report).into();
    expected.extend([Action::Disconnect, Action::Report(lost)]);
    assert_eq!(reports, expected);
}

/// Two intervals, of which the shortest is a millisecond.
#[test]
fn who_is_given_up_before_two_heartbeats_has_no_time() {
    let config = |heartbeat, down_after| LivenessConfig {
        heartbeat,
        down_after,
        ..LivenessConfig::default()
    };
    for (heartbeat, down, enough) in [
        (Duration::ZERO, ms(2), true),
        (Duration::ZERO, ms(2) - Duration::from_nanos(1), false),
        (ms(3), ms(6), true),
        (ms(3), ms(5), false),
        (Duration::MAX, Duration::MAX, true),
        (Duration::MAX, ms(9), false),
    ] {
        assert_eq!(config(heartbeat, down).gives_time(), enough, "{heartbeat:?} {down:?}");
    }
    assert!(LivenessConfig::default().gives_time());
}

/// Heard, then nobody looked at the clock for a while, then the time is looked at: what was heard in that while counts from its end, and who
/// was not heard since before has two heartbeats' time yet. Who is gone stays so.
#[test]
fn what_came_while_nobody_looked_at_the_clock_counts_from_the_end_of_that() {
    for (heartbeat, grace) in [(1, 2), (FOREVER / 2, 4)] {
        let limits =
            Limits { heartbeat, asked: heartbeat, suspect: 2, down: 4, connect: 9, idle: FOREVER };
        for (heard, since) in (0..4).flat_map(|heard| (0..4).map(move |since| (heard, since))) {
            for (now, then) in (since..9).flat_map(|now| (now..14).map(move |then| (now, then))) {
                let mut peer = Peer::accepted(limits.config(), ms(limits.asked), at(0));
                peer.handle_heard(at(heard));
                peer.handle_late(at(since), at(now));
                peer.handle_timeout(at(then));
                let last =
                    heard.max(if heard >= since { now } else { (now + grace).saturating_sub(4) });
                let state = match then.saturating_sub(last) {
                    0..2 => PeerState::Up,
                    2..4 => PeerState::Suspect,
                    _ => PeerState::Down(DownReason::Silent { for_ms: limits.down }),
                };
                assert_eq!(peer.state(), state, "{heard} {since} {now} {then} {heartbeat}");
                assert!(peer.next_timeout() > at(then), "{heard} {since} {now} {then} {heartbeat}");
                let mut gone = peer;
                gone.close(DownReason::Removed);
                let before = gone;
                gone.handle_late(at(0), at(20));
                assert_eq!(gone, before);
            }
        }
        let mut called = Peer::new(limits.config(), at(0));
        called.handle_late(at(0), at(8));
        called.handle_timeout(at(9));
        assert_eq!(called.state(), PeerState::Down(DownReason::NeverAnswered));
    }
}

/// An engine that looks late again and again gives up who is dead all the same: with one heartbeat's time more than it would else, whatever gap
/// between two looks.
#[test]
fn who_is_dead_is_spared_once() {
    let limits = Limits { heartbeat: 1, asked: 1, suspect: 2, down: 6, connect: 9, idle: FOREVER };
    for (gap, heard) in (1..20).flat_map(|gap| [(gap, 1), (gap, 2)]) {
        let mut peer = Peer::accepted(limits.config(), ms(limits.asked), at(0));
        peer.handle_heard(at(heard));
        let mut now = 2;
        while !matches!(peer.state(), PeerState::Down(_)) {
            peer.handle_late(at(now), at(now + gap));
            now += gap;
            peer.handle_timeout(at(now));
            // Heard as late as the first look may be, it is as dead as from then on.
            let heard = if heard == 2 { heard + gap } else { heard };
            assert!(now <= heard + 6 + 2 + 2 * gap, "{gap}: up at {now}");
        }
        // It is heard: then it is spared again.
        let mut peer = Peer::accepted(limits.config(), ms(limits.asked), at(0));
        for turn in 0..4 {
            let now = turn * 100;
            peer.handle_heard(at(now));
            peer.handle_late(at(now + 1), at(now + 1 + 6 + gap));
            peer.handle_timeout(at(now + 1 + 6 + gap));
            assert!(matches!(peer.state(), PeerState::Up | PeerState::Suspect), "{gap}: {turn}");
        }
    }
}

/// Each time it is asked it is another question, and an answer to one before is none.
#[test]
fn what_was_asked_before_is_not_answered_late() {
    let limits =
        Limits { heartbeat: 1, asked: 1, suspect: FOREVER, down: FOREVER, connect: 3, idle: 2 };
    let mut peer = Peer::accepted(limits.config(), ms(1), at(0));
    let mut now = 0;
    for time in 1..600_u64 {
        assert_eq!(peer.parting(), None);
        now += 2;
        peer.handle_timeout(at(now));
        let round = u8::try_from(time % 256).unwrap();
        assert_eq!(peer.parting(), Some(round));
        for other in (0..=255).filter(|other| *other != round) {
            assert!(!peer.handle_stays(at(now), other));
        }
        peer.handle_used(at(now));
        assert_eq!(peer.parting(), Some(round), "use is no answer");
        assert!(peer.handle_stays(at(now), round) && !peer.handle_stays(at(now), round));
    }
}

/// An engine that slept hears first and then looks at the clock: nobody is lost by its sleep.
#[test]
fn what_came_during_our_own_sleep_is_a_sign_of_life() {
    let config =
        Limits { heartbeat: 1, asked: 1, suspect: 2, down: 4, connect: 3, idle: FOREVER }.config();
    let mut peer = Peer::accepted(config, ms(1), at(0));
    assert_eq!(peer.poll_action(), Some(Action::Report(PeerState::Up)));
    peer.handle_heard(at(100));
    peer.handle_timeout(at(100));
    assert_eq!(peer.state(), PeerState::Up);
    assert_eq!(peer.poll_action(), Some(Action::SendHeartbeat));
}

/// A heartbeat goes along with another's from an eighth of the interval before it is due, and the next is an interval
/// after that; nothing goes along to who is not there, nor where nothing is ever due.
#[test]
fn a_heartbeat_goes_along_when_it_is_nearly_due() {
    let config =
        Limits { heartbeat: 16, asked: 16, suspect: 90, down: 99, connect: 99, idle: FOREVER }
            .config();
    for now in 0..40 {
        let mut peer = Peer::accepted(config, ms(16), at(0));
        assert_eq!(peer.poll_action(), Some(Action::Report(PeerState::Up)));
        assert_eq!(peer.is_beat_due(at(now)), now >= 16);
        peer.beat_along(at(now));
        let asked = peer.poll_action();
        assert_eq!(asked, (now >= 14).then_some(Action::SendHeartbeat), "{now}");
        let next = if asked.is_some() { now + 16 } else { 16 };
        assert_eq!(peer.next_timeout(), at(next), "{now}");
    }
    let mut calling = Peer::new(config, at(0));
    let mut left = Peer::accepted(config, ms(16), at(0));
    left.handle_disconnected(DownReason::Disconnected);
    let mut never =
        Peer::accepted(LivenessConfig { heartbeat: Duration::MAX, ..config }, Duration::MAX, at(0));
    for peer in [&mut calling, &mut left, &mut never] {
        let before = *peer;
        assert!(!peer.is_beat_due(Time::NEVER));
        peer.beat_along(at(u64::MAX / 2_000_000));
        assert_eq!(*peer, before);
    }
}

/// "For ever" is not reached, not even at the end of the clock.
#[test]
fn what_never_ends_never_does() {
    let config = LivenessConfig {
        heartbeat: Duration::MAX,
        suspect_after: Duration::MAX,
        down_after: Duration::MAX,
        connect_deadline: Duration::MAX,
        idle_after: Duration::MAX,
    };
    let peers = [Peer::new(config, at(1)), Peer::accepted(config, Duration::MAX, at(1))];
    for mut peer in peers {
        let before = peer;
        assert_eq!(peer.next_timeout(), Time::NEVER);
        peer.handle_timeout(Time::NEVER);
        assert_eq!(peer, before);
    }
}

/// What happened between two polls is told as its outcome.
#[test]
fn reports_not_fetched_are_merged() {
    let config =
        Limits { heartbeat: 9, asked: 9, suspect: 2, down: 4, connect: 3, idle: FOREVER }.config();
    let mut peer = Peer::accepted(config, ms(9), at(0));
    peer.close(DownReason::Protocol);
    peer.close(DownReason::Removed);
    assert_eq!(peer.poll_action(), Some(Action::Disconnect));
    let lost = PeerState::Down(DownReason::Protocol);
    assert_eq!(peer.poll_action(), Some(Action::Report(lost)));
    assert_eq!(peer.poll_action(), None);
}

#[test]
fn both_sides_keep_the_same_connection() {
    let ids = [0, 1, 2, 1 << 63, u64::MAX].map(EngineId);
    for mine in ids {
        for theirs in ids {
            let both = (resolve_crossing(mine, theirs), resolve_crossing(theirs, mine));
            let same = matches!(
                both,
                (Crossing::KeepMine, Crossing::KeepTheirs)
                    | (Crossing::KeepTheirs, Crossing::KeepMine)
            );
            assert!(if mine == theirs { both.0 == Crossing::Myself } else { same });
        }
    }
}

#[test]
fn states_say_why() {
    use std::string::ToString;
    let state = PeerState::Down(DownReason::Refused(Refusal::Busy));
    assert_eq!(
        state.to_string(),
        "down: connection refused: no room, or no memory, for another peer"
    );
    let state = PeerState::Down(DownReason::Silent { for_ms: 4000 });
    assert_eq!(state.to_string(), "down: silent for 4000 ms");
    let state = PeerState::Down(DownReason::Idle);
    assert_eq!(state.to_string(), "down: not used for as long as one end allows");
}

fn any_duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        any::<u64>().prop_map(Duration::from_nanos),
        (0..5_u64).prop_map(Duration::from_nanos),
        any::<u64>().prop_map(Duration::from_secs),
        Just(Duration::MAX),
    ]
}

proptest! {
    /// At the ends of the clock, and when it goes backwards, the machine still moves on.
    #[test]
    fn any_times_are_harmless(
        durations in prop::array::uniform6(any_duration()),
        times in prop::collection::vec((0..EVENTS.len(), prop_oneof![any::<u64>(), 0..9_u64]), 1..12),
    ) {
        let [heartbeat, suspect_after, down_after, connect_deadline, idle_after, asked] = durations;
        let config =
            LivenessConfig { heartbeat, suspect_after, down_after, connect_deadline, idle_after };
        let mut peer = Peer::new(config, Time::from_nanos(times[0].1));
        let mut lost = 0;
        for (event, nanos) in times {
            let now = Time::from_nanos(nanos);
            match EVENTS[event] {
                Event::Connected => peer.handle_connected(asked, now),
                Event::Heard => peer.handle_heard(now),
                Event::Used => peer.handle_used(now),
                Event::Stays => drop(peer.handle_stays(now, 1)),
                Event::Sent => peer.handle_sent(now),
                Event::Timeout => {
                    peer.handle_timeout(now);
                    let next = peer.next_timeout();
                    prop_assert!(next > now || next == Time::NEVER, "{peer:?} {now:?}");
                }
                Event::Disconnected => peer.handle_disconnected(DownReason::Disconnected),
                Event::Close => peer.close(DownReason::Replaced),
            }
            while let Some(action) = peer.poll_action() {
                lost += u32::from(matches!(action, Action::Report(PeerState::Down(_))));
            }
        }
        prop_assert_eq!(lost, u32::from(matches!(peer.state(), PeerState::Down(_))));
    }
}
