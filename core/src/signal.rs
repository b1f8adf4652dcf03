//! Which of many pieces ask to be told of: on a channel that keeps order, the end of one is the end of
//! all before it.
//!
//! A completion costs an entry in a queue, on some transports an answer over the network. A reliable connection
//! that places writes in order (`FI_ORDER_RMA_WAW` of libfabric, a queue pair of verbs) completes them in order,
//! too; so of a batch only the last asks, and answers for those before it.
//!
//! Some transports tell of pieces that did not ask, too: when the bytes have left, not when they are there (`net` of
//! libfabric 1.17). That says nothing, and is not to be taken for an end ([`Chain::has_asked`]).
//!
//! That holds as long as the connection does. Where one may break, and be made anew below whoever posts, an answer over the new one says nothing of
//! what was posted to the old: whoever knows that it broke takes only those for done that asked.
//!
//! Knows contexts, which are small numbers that the caller gives to pieces in flight; not what they stand for.
//!
//! # Invariants
//!
//! 1. A piece ends once: with the first one after it on its channel that asked, or if it asked itself, with itself.
//! 2. No more than [`SILENT_MAX`] pieces in a row do not ask.
//! 3. Of a batch the last one asks. Where it cannot be posted, the channel says that it is owed one
//!    ([`Channel::is_owed`]).
//!
//! The test enumerates batches on two channels, and every order in which they complete.

use crate::group::Storage;

/// So many pieces in a row do not ask: the queue is given back in steps that are small against its depth.
pub const SILENT_MAX: u8 = 7;

/// "No context".
const NONE: u16 = u16::MAX;

/// A connection whose pieces complete in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Channel {
    /// The last one that did not ask, if none after it did, and which tenant of its context it is: it may end by itself, and another have that.
    last: u16,
    tenant: u16,
    silent: u8,
}

impl Default for Channel {
    fn default() -> Self {
        Self { last: NONE, tenant: 0, silent: 0 }
    }
}

impl Channel {
    /// Whether the next piece is to ask; `more` if another follows at once.
    #[must_use]
    #[inline]
    pub const fn asks(&self, more: bool) -> bool {
        !more || self.silent >= SILENT_MAX
    }

    /// Whether pieces wait for one that asks.
    #[must_use]
    #[inline]
    pub const fn is_owed(&self) -> bool {
        self.last != NONE
    }
}

/// Room for what is known of one context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Link {
    /// The piece before, and which tenant of its context it was.
    before: u16,
    tenant_before: u16,
    /// Which tenant of this context comes next, or is there.
    tenant: u16,
    asked: bool,
}

impl Link {
    /// Nothing is in flight.
    pub const VACANT: Self = Self { before: NONE, tenant_before: 0, tenant: 0, asked: false };
}

/// What each piece in flight answers for, in a link for each context that the caller lends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Chain<S>(S);

impl<S: Storage<Link>> Chain<S> {
    /// Nothing is in flight. Contexts are below the number of links, and below 65,535.
    #[must_use]
    pub fn new(mut links: S) -> Self {
        links.as_mut().fill(Link::VACANT);
        Self(links)
    }

    /// A piece was posted on the channel. O(1).
    #[inline]
    pub fn posted(&mut self, channel: &mut Channel, context: u16, asked: bool) {
        let mut tenant = 0;
        if let Some(link) = self.0.as_mut().get_mut(usize::from(context)) {
            (link.before, link.tenant_before) = (channel.last, channel.tenant);
            link.asked = asked;
            tenant = link.tenant;
        }
        *channel = if asked {
            Channel::default()
        } else {
            Channel { last: context, tenant, silent: channel.silent.saturating_add(1) }
        };
    }

    /// Whether the piece that is in flight with this context has asked: whether that it is said to have completed means that
    /// it has. O(1).
    #[must_use]
    #[inline]
    pub fn has_asked(&self, context: u16) -> bool {
        self.0.as_ref().get(usize::from(context)).is_some_and(|link| link.asked)
    }

    /// This piece has ended, and its context is free. Returns the one before it if that ends with it, and has not by
    /// itself: pieces that fail may each say so. O(1).
    #[inline]
    pub fn ended(&mut self, context: u16) -> Option<u16> {
        let links = self.0.as_mut();
        let link = links.get_mut(usize::from(context))?;
        link.tenant = link.tenant.wrapping_add(1);
        let Link { before, tenant_before, .. } = *link;
        link.before = NONE;
        let is_there = links.get(usize::from(before)).is_some_and(|it| it.tenant == tenant_before);
        is_there.then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};
    use std::vec::Vec;

    use super::*;

    /// Pieces that are to be posted: on which channel, and whether one follows at once.
    const PLAN: [(usize, bool); 7] =
        [(0, true), (0, true), (1, true), (1, false), (0, false), (0, true), (1, false)];

    #[derive(Clone, PartialEq, Eq, Hash)]
    struct World {
        chain: Chain<[Link; 8]>,
        channels: [Channel; 2],
        /// In flight, in order, by channel: context, and whether it asked.
        queues: [VecDeque<(u16, bool)>; 2],
        ended: Vec<u16>,
        posted: u16,
    }

    impl World {
        fn post(&mut self) {
            let (channel, more) = PLAN[usize::from(self.posted)];
            let asked = self.channels[channel].asks(more);
            self.chain.posted(&mut self.channels[channel], self.posted, asked);
            for &(context, asked) in self.queues.iter().flatten() {
                assert_eq!(self.chain.has_asked(context), asked);
            }
            assert_eq!(self.chain.has_asked(self.posted), asked);
            self.queues[channel].push_back((self.posted, asked));
            self.posted += 1;
        }

        /// The first of a channel that asked completes: what was before it has ended, with it.
        fn complete(&mut self, channel: usize) {
            let first = self.queues[channel].iter().position(|&(_, asked)| asked).unwrap();
            let told: HashSet<u16> = self.queues[channel].drain(..=first).map(|it| it.0).collect();
            let mut heard = HashSet::new();
            let mut next = told.iter().copied().max();
            while let Some(context) = next {
                assert!(heard.insert(context) && !self.ended.contains(&context));
                next = self.chain.ended(context);
            }
            assert_eq!(heard, told);
            self.ended.extend(heard);
            self.ended.sort_unstable();
        }
    }

    #[test]
    fn pieces_end_once_with_the_next_that_asked() {
        let world = World {
            chain: Chain::new([Link::VACANT; 8]),
            channels: [Channel::default(); 2],
            queues: Default::default(),
            ended: Vec::new(),
            posted: 0,
        };
        let (mut open, mut seen, mut ends) = (Vec::from([world]), HashSet::new(), 0);
        while let Some(world) = open.pop() {
            if !seen.insert(world.clone()) {
                continue;
            }
            if usize::from(world.posted) < PLAN.len() {
                let mut next = world.clone();
                next.post();
                open.push(next);
            }
            for channel in 0..2 {
                // Who is owed an answer is who has silent pieces behind the last that asked.
                let queue = &world.queues[channel];
                assert_eq!(world.channels[channel].is_owed(), queue.back().is_some_and(|it| !it.1));
                if queue.iter().any(|&(_, asked)| asked) {
                    let mut next = world.clone();
                    next.complete(channel);
                    open.push(next);
                }
            }
            // The sixth has one after it that never came.
            ends += u32::from(world.ended == [0, 1, 2, 3, 4, 6]);
        }
        assert!(ends == 1 && seen.len() == 20, "{ends} {}", seen.len());
    }

    /// Those that fail say so one by one, first to last; then none is told of twice, though its context is used again.
    #[test]
    fn who_has_ended_by_itself_does_not_end_again() {
        for used_again in [false, true] {
            let (mut chain, mut channel) = (Chain::new([Link::VACANT; 4]), Channel::default());
            let mut other = Channel::default();
            chain.posted(&mut channel, 0, false);
            chain.posted(&mut channel, 1, false);
            chain.posted(&mut channel, 2, true);
            assert_eq!(chain.ended(0), None);
            if used_again {
                chain.posted(&mut other, 0, false);
            }
            assert_eq!(chain.ended(2), Some(1));
            assert_eq!(chain.ended(1), None);
            assert_eq!(other.is_owed(), used_again);
        }
    }

    /// Pieces in flight, each with a number of its own: by channel, in order, with its context and whether it asked.
    #[derive(Clone)]
    struct Reused {
        chain: Chain<[Link; 3]>,
        channels: [Channel; 2],
        queues: [VecDeque<(u32, u16, bool)>; 2],
        /// The last that came back is used first.
        free: Vec<u16>,
        posted: u32,
    }

    impl Reused {
        /// All that ends with this context: from it on backwards.
        fn end(&mut self, context: u16) -> Vec<u16> {
            let mut ended = Vec::from([context]);
            let mut next = context;
            while let Some(before) = self.chain.ended(next) {
                ended.push(before);
                next = before;
            }
            self.free.extend(ended.iter().copied());
            ended
        }

        /// Every way on for so many steps more; returns how many there are.
        fn go_on(&self, steps: u32) -> u32 {
            if steps == 0 {
                return 1;
            }
            let mut ways = 0;
            for channel in 0..2 {
                for asked in [false, true] {
                    let mut next = self.clone();
                    let Some(context) = next.free.pop() else { continue };
                    next.chain.posted(&mut next.channels[channel], context, asked);
                    next.queues[channel].push_back((next.posted, context, asked));
                    next.posted += 1;
                    ways += next.go_on(steps - 1);
                }
                // The oldest fails, and says so.
                let mut next = self.clone();
                if let Some((_, context, _)) = next.queues[channel].pop_front() {
                    assert_eq!(next.end(context), [context], "another's end");
                    ways += next.go_on(steps - 1);
                }
                // The first that asked is done.
                let mut next = self.clone();
                if let Some(first) = next.queues[channel].iter().position(|it| it.2) {
                    let mut told: Vec<_> =
                        next.queues[channel].drain(..=first).map(|it| it.1).collect();
                    told.reverse();
                    assert_eq!(next.end(told[0]), told);
                    ways += next.go_on(steps - 1);
                }
            }
            ways
        }
    }

    #[test]
    fn who_has_failed_gives_its_context_to_another_and_not_its_end() {
        let all = Reused {
            chain: Chain::new([Link::VACANT; 3]),
            channels: [Channel::default(); 2],
            queues: Default::default(),
            free: Vec::from([2, 1, 0]),
            posted: 0,
        };
        assert!(all.go_on(7) > 10_000);
    }

    #[test]
    fn not_too_many_are_silent() {
        let mut chain = Chain::new([Link::VACANT; 64]);
        let mut channel = Channel::default();
        for context in 0..64 {
            let asked = channel.asks(true);
            assert_eq!(asked, context % (u16::from(SILENT_MAX) + 1) == u16::from(SILENT_MAX));
            chain.posted(&mut channel, context, asked);
        }
        assert!(!channel.is_owed());
        assert_eq!(chain.ended(64), None);
        assert!(Channel::default().asks(false));
    }
}
