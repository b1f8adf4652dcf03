//! Whose call is taken: a new one, one that crosses ours, and never one that its caller has given up.
//!
//! An engine numbers its calls from 1, whomever it calls, and says with each call and each answer how far
//! it has counted ([`Hello::call`]). It calls nobody whom it is calling already, and gives its call up for
//! one that it answers: so an answer says that all calls up to that number are given up, and a call that
//! all before it are. Over a network such a call may arrive late, even after the connection that it was
//! given up for. Taken for the news that this connection is lost, it would end a good one.
//!
//! Knows no socket and no clock; who is there comes in as an argument.
//!
//! # Invariants
//!
//! 1. Of an engine that is remembered no call is taken that is not newer than each one noted.
//! 2. Whoever is live is remembered, if there are as many slots as there can be live engines.
//! 3. Both sides of two crossing calls keep the same one.
//!
//! The memory is bounded. When it is full, the engine that was noted longest ago, of those that are not
//! live, is forgotten: a call of its that comes later still is taken for a new one. It then finds nobody
//! it could replace, by 2, and ends as every connection does that nobody holds at the other end.
//!
//! The tests below run every short sequence against a record without bounds; `verification/protocol`
//! explores two engines that call each other over a network that keeps no order.
//!
//! [`Hello::call`]: crate::wire::Hello::call

use crate::group::Storage;
use crate::id::EngineId;
use crate::peer::{Crossing, PeerState, resolve_crossing};
use crate::wire::Refusal;

/// What becomes of a call that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Taken {
    /// The caller becomes a new peer.
    New,
    /// The peer that it is stands no more: the caller has lost that connection before we have, or it
    /// would not call. It becomes a new peer.
    Replaces,
    /// We are calling it, too, and its call is kept: it answers ours.
    Crossed,
}

/// Room for what is remembered of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallSlot {
    engine: EngineId,
    /// The newest number noted; zero if the slot is vacant.
    newest: u64,
}

impl CallSlot {
    /// A vacant slot.
    pub const VACANT: Self = Self { engine: EngineId(0), newest: 0 };
}

/// Which calls of which engines count no more, in slots that the caller lends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Calls<S> {
    /// Noted last, first; vacant slots behind all others.
    slots: S,
}

impl<S: Storage<CallSlot>> Calls<S> {
    /// Remembers nobody yet; at most as many engines as there are slots.
    #[must_use]
    pub fn new(mut slots: S) -> Self {
        slots.as_mut().fill(CallSlot::VACANT);
        Self { slots }
    }

    /// What becomes of call number `number` of the engine `from` to us, the engine `mine`. `live` is the
    /// state of the peer that the caller is or is becoming, if it is one that is not down.
    ///
    /// Changes nothing; [`Calls::note`] a call that is answered. O(slots).
    ///
    /// # Errors
    ///
    /// The reason to be sent back: [`Refusal::Myself`], [`Refusal::Stale`], or [`Refusal::Crossed`].
    pub fn judge(
        &self,
        mine: EngineId,
        from: EngineId,
        number: u64,
        live: Option<PeerState>,
    ) -> Result<Taken, Refusal> {
        if from == mine {
            return Err(Refusal::Myself);
        }
        if number <= self.newest(from) {
            return Err(Refusal::Stale);
        }
        match live {
            None | Some(PeerState::Down(_)) => Ok(Taken::New),
            Some(PeerState::Up | PeerState::Suspect) => Ok(Taken::Replaces),
            Some(PeerState::Connecting) => match resolve_crossing(mine, from) {
                Crossing::KeepTheirs => Ok(Taken::Crossed),
                Crossing::KeepMine => Err(Refusal::Crossed),
                Crossing::Myself => Err(Refusal::Myself),
            },
        }
    }

    /// The engine `from` has made `number` calls, of which none counts any more but one that was answered:
    /// to be noted of each call that we answer, and of each answer. `is_live` tells who is not to be
    /// forgotten for it, and is asked only when no slot is vacant, from the engine noted longest ago on. O(slots).
    pub fn note(&mut self, from: EngineId, number: u64, is_live: impl Fn(EngineId) -> bool) {
        if number == 0 {
            return; // It has called nobody: there is nothing to remember.
        }
        let newest = number.max(self.newest(from));
        let slots = self.slots.as_mut();
        let vacant = |slot: &CallSlot| slot.newest == 0;
        let at = slots
            .iter()
            .position(|slot| vacant(slot) || slot.engine == from)
            .or_else(|| slots.iter().rposition(|slot| !is_live(slot.engine)))
            .unwrap_or(slots.len().saturating_sub(1));
        let Some(moved) = slots.get_mut(..=at) else { return };
        moved.rotate_right(1);
        if let Some(first) = moved.first_mut() {
            *first = CallSlot { engine: from, newest };
        }
    }

    /// The newest number noted of an engine; zero if it is not remembered.
    fn newest(&self, engine: EngineId) -> u64 {
        let slots = self.slots.as_ref().iter();
        let mut known = slots.filter(|slot| slot.newest > 0 && slot.engine == engine);
        known.next().map_or(0, |slot| slot.newest)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::peer::DownReason;

    const ME: EngineId = EngineId(10);

    fn calls(slots: usize) -> Calls<Vec<CallSlot>> {
        Calls::new(vec![CallSlot::VACANT; slots])
    }

    fn is_taken(calls: &Calls<Vec<CallSlot>>, from: u64, number: u64) -> bool {
        let judged = calls.judge(ME, EngineId(from), number, None);
        assert!(matches!(judged, Ok(Taken::New) | Err(Refusal::Stale)), "{judged:?}");
        judged.is_ok()
    }

    #[test]
    fn what_becomes_of_a_call_follows_from_who_is_there() {
        let calls = calls(2);
        let judge = |from, live| calls.judge(ME, EngineId(from), 1, live);
        let down = PeerState::Down(DownReason::Removed);
        for from in [9, 11] {
            for nobody in [None, Some(down)] {
                assert_eq!(judge(from, nobody), Ok(Taken::New));
            }
            for there in [PeerState::Up, PeerState::Suspect] {
                assert_eq!(judge(from, Some(there)), Ok(Taken::Replaces));
            }
        }
        assert_eq!(judge(9, Some(PeerState::Connecting)), Ok(Taken::Crossed));
        assert_eq!(judge(11, Some(PeerState::Connecting)), Err(Refusal::Crossed));
        for live in [None, Some(PeerState::Connecting), Some(PeerState::Up)] {
            assert_eq!(judge(10, live), Err(Refusal::Myself));
        }
    }

    /// An old call is stale whoever is there: above all while a connection stands, or another is made.
    #[test]
    fn a_call_no_newer_than_one_noted_is_stale_whoever_is_there() {
        let mut calls = calls(1);
        assert_eq!(
            calls.judge(ME, EngineId(9), 0, None),
            Err(Refusal::Stale),
            "no call has number 0"
        );
        calls.note(EngineId(9), 5, |_| false);
        for live in [None, Some(PeerState::Connecting), Some(PeerState::Up)] {
            for number in [0, 1, 5] {
                assert_eq!(calls.judge(ME, EngineId(9), number, live), Err(Refusal::Stale));
            }
            assert!(calls.judge(ME, EngineId(9), 6, live).is_ok());
        }
        calls.note(EngineId(9), u64::MAX, |_| false);
        assert!(!is_taken(&calls, 9, u64::MAX));
    }

    /// Every sequence of four notes of three engines, one of them live, over one to four slots, against a
    /// record that forgets nothing.
    #[test]
    fn the_live_are_remembered_and_nobody_is_mistaken() {
        const NOTES: [(u64, u64); 9] =
            [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (3, 1)];
        let (mut sequences, mut forgotten) = (0, 0);
        for slots in 1..=4 {
            for word in 0..NOTES.len().pow(4) {
                let mut calls = calls(slots);
                let mut all: BTreeMap<u64, u64> = BTreeMap::new();
                let mut last = Vec::new();
                for step in 0..4 {
                    let (from, number) = NOTES[word / NOTES.len().pow(step) % NOTES.len()];
                    calls.note(EngineId(from), number, |engine| engine == EngineId(1));
                    if number > 0 {
                        let newest = all.entry(from).or_default();
                        *newest = number.max(*newest);
                        last.retain(|other| *other != from);
                        last.push(from);
                    }
                    // Who is noted comes in; who is live stays while there is a slot for it beside.
                    let mut kept: Vec<u64> = last.clone();
                    while kept.len() > slots {
                        let gone = kept.iter().position(|it| *it != 1 || slots == 1).unwrap();
                        kept.remove(gone);
                        forgotten += 1;
                    }
                    last.clone_from(&kept);
                    all.retain(|engine, _| kept.contains(engine));
                    for from in 0..4 {
                        let newest = all.get(&from).copied().unwrap_or(0);
                        for number in 1..4 {
                            assert_eq!(is_taken(&calls, from, number), number > newest);
                        }
                    }
                }
                sequences += 1;
            }
        }
        assert!(sequences == 4 * 6561 && forgotten > 1000, "{sequences} {forgotten}");
    }

    #[test]
    fn without_a_slot_nothing_is_remembered() {
        let mut calls = calls(0);
        calls.note(EngineId(1), 5, |_| true);
        assert!(is_taken(&calls, 1, 5));
    }
}
