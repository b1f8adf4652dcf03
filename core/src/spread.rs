//! Which queue a copy goes to, and how much of the device it may have: a device that copies has several queues, each of which makes its
//! copies in order, one after the other, and beside those of the others. And which device it is, where any may do it ([`by`]).
//!
//! To one peer alone, two queues take turns: one copy begins while another ends. To several, each has a queue of its own, so that all of
//! them are written to all the time. If all ranks of an exchange wrote to one peer after the other, those that are ahead would
//! meet at a peer that another is not done with, and share its link, while links of others lie idle.
//!
//! A device has to be given its copies, which takes time, and so does each copy's beginning and end. So as long as it has enough to do, one that
//! more may be added to is kept back ([`Growth`]), until it is long enough itself ([`is_enough`]): a device that has nothing to do is soon
//! given a little, and the more, the more it has.
//!
//! Knows neither what is copied nor what a queue is; time is told by bytes, and by how often it is asked.
//!
//! # Invariants
//!
//! 1. A copy goes to a queue that has room.
//! 2. As long as one queue has nothing to do, no two peers share one.
//! 3. A peer is in more than one queue only if, when it was given the last of them, there were copies to no other; and never in more than
//!    [`ALONE`].
//! 4. A copy is kept back while its device takes none. Else only while that has [`BUSY_BYTES`] or more to do, more may come, the copy is less
//!    than [`GROWTH`] times that, and it was not asked for twice without having grown.
//! 5. Copies to one peer alone have the whole budget each: while two of them run, one is about to end. Those to several have about
//!    one budget together.
//!
//! The tests below go through all states of three queues.

use core::num::NonZeroU32;

/// Queues that copies to one peer are in while there are none to others.
pub const ALONE: usize = 2;

/// A device that is still to copy so many has work for longer than it takes to say what else there is: 12 us of an H200's link, in which some
/// thousands of pages are listed.
pub const BUSY_BYTES: u64 = 4 << 20;

/// What a queue has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load<P> {
    /// Whom its last copy goes to; `None`: it has nothing to do.
    pub to: Option<P>,
    /// Bytes that it is still to copy.
    pub bytes: u64,
    /// Whether it takes another copy.
    pub has_room: bool,
}

/// The device that copies what all of them can read, by its place: the one that has the destination, if it gets at that, else the first
/// that does. `ways` says of each whether it does; `None`: none does. O(devices).
pub fn by(home: Option<usize>, ways: impl Iterator<Item = bool> + Clone) -> Option<usize> {
    let mut all = ways.clone();
    let home = home.filter(|&home| all.nth(home) == Some(true));
    home.or_else(|| ways.clone().position(|way| way))
}

/// The queue that a copy to `peer` goes to, by its place; `None`: none that it may be in has room. O(queues).
pub fn choose<P: Copy + Eq>(
    queues: impl Iterator<Item = Load<P>> + Clone,
    peer: P,
) -> Option<usize> {
    let own = queues.clone().filter(|queue| queue.to == Some(peer)).count();
    let others = queues.clone().any(|queue| queue.to.is_some_and(|to| to != peer));
    let most = if others { 1 } else { ALONE };
    if own < most {
        let idle = queues.clone().position(|queue| queue.to.is_none() && queue.has_room);
        if idle.is_some() {
            return idle;
        }
    }
    let may = |queue: &Load<P>| queue.has_room && (own == 0 || queue.to == Some(peer));
    let fit = queues.enumerate().filter(|(_, queue)| may(queue));
    fit.min_by_key(|(_, queue)| queue.bytes).map(|(at, _)| at)
}

/// Processors of the device for the next copy, of as many as there are for one. Its queue is among these. O(queues).
///
/// More than it takes to fill the device's link make it no faster, and those of several copies meet each other on the way out: on an H200 ten SMs
/// fill it.
pub fn processors<P: Copy + Eq>(
    queues: impl Iterator<Item = Load<P>> + Clone,
    budget: NonZeroU32,
) -> NonZeroU32 {
    let busy = queues.filter_map(|queue| queue.to);
    let alone = busy.clone().zip(busy.clone().skip(1)).all(|(one, next)| one == next);
    let count = u32::try_from(busy.count()).unwrap_or(u32::MAX);
    let each =
        if alone { Some(budget) } else { NonZeroU32::new(budget.get().div_ceil(count.max(1))) };
    each.unwrap_or(NonZeroU32::MIN)
}

/// Whether a copy that may still grow is to begin: it is asked after each call that may have added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Growth {
    in_vain: u8,
}

impl Growth {
    /// Who adds to a copy is asked first after it has, then before it adds again.
    const ASKED: u8 = 2;

    /// Nothing has grown yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { in_vain: 0 }
    }

    /// Something was added to it.
    pub const fn grew(&mut self) {
        self.in_vain = 0;
    }

    /// Whether more may come; to be asked once a call.
    pub const fn may_go_on(&mut self) -> bool {
        let may = self.in_vain < Self::ASKED;
        if may {
            self.in_vain += 1;
        }
        may
    }
}

/// What a device without work is given at once: 23 us of an H200's link.
pub const FIRST_BYTES: u64 = 8 << 20;

/// A further copy begins with so many times what the device still has to do: that is listed, and taken by its driver, in the meantime. Pages of 4 KiB on an H200.
pub const GROWTH: u64 = 4;

/// Whether a copy of so many bytes, which has just grown, begins whatever else may come, on a device that is still to copy `under_way` bytes.
#[must_use]
pub const fn is_enough(bytes: u64, under_way: u64) -> bool {
    bytes >= FIRST_BYTES && bytes / GROWTH >= under_way
}

/// Whether a copy is kept back that more may be added to, by a device that is still to copy so many bytes; `takes_none`: who gave it another
/// now would have to wait.
#[must_use]
pub const fn is_kept(may_go_on: bool, takes_none: bool, bytes: u64) -> bool {
    takes_none || (may_go_on && bytes >= BUSY_BYTES)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    type Queue = Load<u8>;

    /// Each state of a queue, with up to two peers and different loads.
    fn states() -> Vec<Queue> {
        let mut all = Vec::new();
        for has_room in [false, true] {
            all.push(Load { to: None, bytes: 0, has_room });
            for to in [0, 1, 2] {
                all.extend([1, 2].map(|bytes| Load { to: Some(to), bytes, has_room }));
            }
        }
        all
    }

    fn each_three(mut call: impl FnMut(&[Queue; 3])) {
        let all = states();
        for a in &all {
            for b in &all {
                all.iter().for_each(|c| call(&[*a, *b, *c]));
            }
        }
    }

    /// Up to five devices, of which any have a way, and one, none, or one that is not there has the destination.
    #[test]
    fn who_has_a_way_copies_and_who_has_the_destination_before_others() {
        for count in 0..6_usize {
            for ways in 0..1_u32 << count {
                let has = |at: usize| at < count && ways >> at & 1 == 1;
                for home in [None].into_iter().chain((0..count + 2).map(Some)) {
                    let made = by(home, (0..count).map(has));
                    assert_eq!(made.is_some(), ways != 0, "{count} {ways:b} {home:?}");
                    let Some(at) = made else { continue };
                    assert!(has(at), "{count} {ways:b} {home:?}");
                    match home.filter(|&home| has(home)) {
                        Some(home) => assert_eq!(at, home),
                        None => assert!((0..at).all(|before| !has(before))),
                    }
                }
            }
        }
    }

    #[test]
    fn a_copy_goes_to_a_queue_that_may_have_it() {
        let mut chosen = 0;
        each_three(|queues| {
            let own: Vec<_> = queues.iter().filter(|queue| queue.to == Some(0)).collect();
            let others = queues.iter().any(|queue| queue.to.is_some_and(|to| to != 0));
            let idle = queues.iter().any(|queue| queue.to.is_none() && queue.has_room);
            let Some(at) = choose(queues.iter().copied(), 0) else {
                // Nobody takes it, or it would be more than a peer has.
                let none = |mut of: std::slice::Iter<'_, &Queue>| of.all(|queue| !queue.has_room);
                let all: Vec<_> = queues.iter().collect();
                let enough = own.len() >= if others { 1 } else { ALONE };
                assert!(
                    none(all.iter()) || !own.is_empty() && none(own.iter()) && (enough || !idle)
                );
                return;
            };
            chosen += 1;
            assert!(queues[at].has_room, "{queues:?}");
            match queues[at].to {
                None => assert!(own.len() < if others { 1 } else { ALONE }, "{queues:?}"),
                Some(0) => assert!(!idle || own.len() >= ALONE || others, "{queues:?}"),
                Some(_) => assert!(own.is_empty() && !idle, "{queues:?}"),
            }
            // Of those like it, one that has least to do.
            let like = queues
                .iter()
                .filter(|q| q.has_room && (q.to == Some(0)) == (queues[at].to == Some(0)));
            let least = like.map(|queue| queue.bytes).min();
            assert!(queues[at].to.is_none() || least == Some(queues[at].bytes), "{queues:?}");
        });
        assert!(chosen > 1500, "{chosen}");
    }

    /// Copies to up to three peers in all orders, five of them: what the invariants say of whole programs.
    #[test]
    fn peers_are_kept_apart_and_one_alone_has_two() {
        for program in 0..3_u32.pow(5) {
            let mut queues = [Load { to: None, bytes: 0, has_room: true }; 3];
            for step in 0..5 {
                let peer = (program / 3_u32.pow(step) % 3) as u8;
                let at = choose(queues.iter().copied(), peer).unwrap();
                assert!(
                    queues[at].to.is_none_or(|to| to == peer)
                        || queues.iter().all(|q| q.to.is_some())
                );
                queues[at] = Load { to: Some(peer), bytes: queues[at].bytes + 1, has_room: true };
                assert!(queues.iter().filter(|queue| queue.to == Some(peer)).count() <= ALONE);
            }
            let peers: Vec<u8> = (0..5).map(|step| (program / 3_u32.pow(step) % 3) as u8).collect();
            if peers.iter().all(|peer| *peer == peers[0]) {
                let loads: Vec<u64> = queues.iter().map(|queue| queue.bytes).collect();
                assert_eq!(loads, [3, 2, 0], "they take turns");
            }
        }
    }

    /// Every way of seven calls, of which some add to a copy: it begins with the second that does not after one that did, and stays so.
    #[test]
    fn a_copy_begins_when_it_was_asked_for_twice_in_vain() {
        for calls in 0..1_u32 << 7 {
            let (mut growth, mut in_vain) = (Growth::new(), 0);
            for call in 0..7 {
                // Staging, and the question after it; then the question of the poll.
                let adds = calls >> call & 1 == 1;
                if adds {
                    growth.grew();
                    in_vain = 0;
                }
                assert_eq!(growth.may_go_on(), in_vain < 2, "{calls:b}, {call}");
                in_vain += 1;
            }
        }
    }

    #[test]
    fn a_device_without_work_is_never_kept_waiting_unless_it_takes_none() {
        for bytes in [0, 1, BUSY_BYTES - 1, BUSY_BYTES, u64::MAX] {
            let is_busy = bytes >= BUSY_BYTES;
            assert_eq!([true, false].map(|more| is_kept(more, false, bytes)), [is_busy, false]);
            assert_eq!([true, false].map(|more| is_kept(more, true, bytes)), [true, true]);
        }
    }

    /// Lists of 2^20 runs of any length: a little begins at once, then each copy is as long as it may be and not much longer, and few are
    /// made of all.
    #[test]
    fn a_long_list_begins_soon_and_is_not_cut_small() {
        for run in [1 << 10, 255 << 12, FIRST_BYTES - 1, FIRST_BYTES, 1 << 30] {
            let (mut under_way, mut staged, mut copies) = (0, 0, 0);
            for _ in 0..1 << 20 {
                staged += run;
                let least = FIRST_BYTES.max(GROWTH * under_way);
                assert_eq!(is_enough(staged, under_way), staged >= least, "{staged}, {under_way}");
                if staged >= least {
                    assert!(staged < least + run);
                    (under_way, staged, copies) = (under_way + staged, 0, copies + 1);
                }
            }
            assert!(copies > 0 && under_way >= (1 + GROWTH).pow(copies - 1) * FIRST_BYTES, "{run}");
        }
        assert!(!is_enough(u64::MAX, u64::MAX) && is_enough(u64::MAX, u64::MAX / GROWTH));
    }

    #[test]
    fn several_share_what_one_alone_has() {
        for budget in 1..=132 {
            let budget = NonZeroU32::new(budget).unwrap();
            each_three(|queues| {
                let each = processors(queues.iter().copied(), budget);
                let mut peers: Vec<_> = queues.iter().filter_map(|queue| queue.to).collect();
                let busy = u32::try_from(peers.len()).unwrap();
                peers.dedup();
                if peers.len() < 2 {
                    assert_eq!(each, budget);
                } else {
                    let all = each.get() * busy;
                    assert!(all >= budget.get() && all < budget.get() + busy, "{queues:?}");
                }
            });
        }
        let queues = [0, 1, 2].map(|to| Load { to: Some(to), bytes: 1, has_room: true });
        assert_eq!(processors(queues.into_iter(), NonZeroU32::new(8).unwrap()).get(), 3);
    }
}
