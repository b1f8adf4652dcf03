//! Two ends of one connection that would both let it go, over a network that keeps no order and delivers at any time: every
//! state that a few looks at the clock and a write of each lead to.
//!
//! A write is done for its sender when it has arrived, whether it was read by then or not: as a NIC acknowledges it. The end that closes
//! the connection must have read all that has, for nobody else tells of it.

use std::collections::HashSet;

use super::*;
use crate::mailbox::Round;

/// Looks at the clock, each when the first of both ends has something to do.
const LOOKS: u8 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct End {
    group: Group,
    /// Arrived, and not read.
    unread: Vec<u32>,
    /// What the other asks, and whether nothing was unread since.
    asked: Option<(Round, bool)>,
    is_open: bool,
    submitted: bool,
    /// Writes of its that have arrived, and of the other's that it has counted.
    done: u8,
    counted: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pair {
    now: Time,
    looks: u8,
    ends: [End; 2],
    /// To which end, in no order.
    flying: Vec<(usize, WorkRequest)>,
}

impl Pair {
    /// Of these ends, each with whether it is to write.
    fn new(ends: [(Group, bool); 2]) -> Self {
        let ends = ends.map(|(group, writes)| End {
            group,
            unread: Vec::new(),
            asked: None,
            is_open: true,
            submitted: !writes,
            done: 0,
            counted: 0,
        });
        Self { now: Time::ZERO, looks: 0, ends, flying: Vec::new() }
    }

    /// Does what the group asks for.
    fn events(&mut self, at: usize, peer: PeerId) {
        while let Some(event) = self.ends[at].group.poll_event() {
            match event {
                super::Event::Heartbeat { peer } => self.ends[at].group.beat(peer),
                super::Event::Disconnect { .. } => {
                    let unread = &self.ends[at].unread;
                    let lost = unread.iter().any(|bits| Control::decode(*bits).is_none());
                    assert!(!lost, "a write is done and not counted: {self:?}");
                    self.close(at, peer);
                }
                _ => {}
            }
        }
    }

    /// This end takes nothing any more, and nothing that it has posted arrives.
    fn close(&mut self, at: usize, peer: PeerId) {
        self.ends[at].is_open = false;
        self.ends[at].asked = None;
        let mut lost = Vec::new();
        self.flying.retain(|(to, work)| {
            let stays = *to == at;
            if !stays {
                lost.push(work.token);
            }
            stays
        });
        for token in lost {
            let error = Err(WorkError::Flushed);
            self.ends[at].group.handle_completion(self.now, 0, token, error);
        }
        self.events(at, peer);
    }

    fn read(&mut self, at: usize, index: usize, peer: PeerId) {
        let now = self.now;
        let end = &mut self.ends[at];
        let control = Control::decode(end.unread.remove(index));
        let used = control.is_none_or(|it| it.is_ok_and(Control::is_use));
        end.group.handle_heard(now, peer, used);
        match control {
            None => end.counted += 1,
            Some(Ok(Control::Heartbeat(Usage::Over(round)))) => end.asked = Some((round, false)),
            Some(Ok(Control::Heartbeat(Usage::Stays(round)))) => {
                end.group.handle_stays(now, peer, round);
            }
            Some(_) => {}
        }
        self.events(at, peer);
    }

    /// All that can happen next.
    fn next(&self, peer: PeerId) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            next.flying.sort_by_key(|(to, work)| (*to, work.token.bits(), work.imm.map(Imm::bits)));
            all.push(next);
        };
        let due = self.ends.iter().filter(|end| end.is_open).map(|end| end.group.poll_timeout());
        if let Some(due) = due.min().filter(|due| self.looks < LOOKS && *due != Time::NEVER) {
            add(&|next| {
                (next.now, next.looks) = (due.max(self.now), self.looks + 1);
                for at in 0..2 {
                    if next.ends[at].is_open {
                        next.ends[at].group.handle_timeout(next.now);
                        next.events(at, peer);
                    }
                }
            });
        }
        for at in 0..2 {
            let (end, other) = (&self.ends[at], &self.ends[1 - at]);
            if !end.is_open {
                continue;
            }
            if !end.submitted {
                add(&|next| {
                    let options = Options { deadline: Time::NEVER, user: 0 };
                    let request = immediate(peer).check().unwrap();
                    // It may be down, and not told yet.
                    let _ = next.ends[at].group.submit(request, options);
                    next.ends[at].submitted = true;
                });
            }
            if end.group.has_work(0) {
                add(&|next| {
                    let work = next.ends[at].group.poll_work(0);
                    next.flying.extend(work.map(|work| (1 - at, work)));
                });
            }
            for index in 0..end.unread.len() {
                add(&|next| next.read(at, index, peer));
            }
            if let Some((round, drained)) = end.asked {
                if !drained && end.unread.is_empty() {
                    add(&|next| next.ends[at].asked = Some((round, true)));
                }
                if drained {
                    add(&|next| {
                        next.ends[at].asked = None;
                        next.ends[at].group.handle_parting(next.now, peer, round, false);
                        next.events(at, peer);
                    });
                }
            }
            if !other.is_open {
                // All that the other had done is read, before its end is looked at.
                add(&|next| {
                    while !next.ends[at].unread.is_empty() {
                        next.read(at, 0, peer);
                    }
                    let reason = DownReason::Disconnected;
                    next.ends[at].group.handle_disconnected(next.now, peer, reason);
                    next.close(at, peer);
                });
            }
        }
        for (index, (to, _)) in self.flying.iter().enumerate() {
            // What goes to who is gone fails with the connection, below.
            if !self.ends[*to].is_open {
                continue;
            }
            add(&|next| {
                let (to, work) = next.flying.remove(index);
                let bits = work.imm.map_or(0, Imm::bits);
                next.ends[to].unread.push(bits);
                next.ends[1 - to].done += u8::from(Control::decode(bits).is_none());
                next.ends[1 - to].group.handle_completion(next.now, 0, work.token, Ok(()));
                next.events(1 - to, peer);
                if Control::decode(bits).is_some() {
                    // Nobody loses a heartbeat: whether it has arrived or was read is the same.
                    let last = next.ends[to].unread.len() - 1;
                    next.read(to, last, peer);
                }
            });
        }
        all
    }
}

#[test]
fn what_is_done_is_counted_whoever_parts() {
    let ms = Duration::from_millis;
    let setup = Setup { peers: 1, nics: 1, peer_nics: 1, slots: 1, ..SMALL };
    let mut tally = Tally::default();
    for (both_ask, both_write) in [(false, true), (true, false)] {
        let group = |idle_after| {
            let liveness = LivenessConfig { heartbeat: ms(2), idle_after, ..NEVER };
            let mut world = World::with(setup, GroupConfig { liveness, ..config(SMALL) });
            while world.group.poll_event().is_some() {}
            (world.live(0).unwrap(), world.group)
        };
        let (peer, asks) = group(ms(2));
        let (_, other) = if both_ask { (peer, asks.clone()) } else { group(Duration::MAX) };
        explore(Pair::new([(asks, true), (other, both_write)]), peer, &mut tally);
    }
    let Tally { states, parted, stayed, unbegun } = tally;
    assert!(states > 30_000 && parted > 10 && stayed > 1_000 && unbegun > 0, "{tally:?}");
}

/// What was seen.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    states: usize,
    /// Both ends are closed; of these, with a write that was never begun.
    parted: u32,
    unbegun: u32,
    /// All that is to be written is counted, and both are open.
    stayed: u32,
}

fn explore(first: Pair, peer: PeerId, tally: &mut Tally) {
    let writes = first.ends.iter().map(|end| u8::from(!end.submitted)).sum::<u8>();
    let mut seen = HashSet::from([first.clone()]);
    let mut todo = vec![first];
    while let Some(pair) = todo.pop() {
        let [one, other] = &pair.ends;
        let counted = one.counted + other.counted;
        match (one.is_open, other.is_open) {
            (false, false) => {
                assert_eq!((one.done, other.done), (other.counted, one.counted), "{pair:?}");
                tally.parted += 1;
                tally.unbegun += u32::from(one.submitted && other.submitted && counted < writes);
            }
            (true, true) => tally.stayed += u32::from(counted == writes),
            _ => {}
        }
        for next in pair.next(peer) {
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    tally.states += seen.len();
}
