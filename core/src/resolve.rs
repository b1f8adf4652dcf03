//! Which addresses are looked up, in which order, and for how long the answers count.
//!
//! On Ethernet the kernel finds out which device has an address, and takes a second when nobody has. Whoever may not
//! wait so long has others look it up, some at a time, and goes on meanwhile. Knows neither addresses nor lookups:
//! *keys* and *values* are the platform's, and so are the threads that do it.
//!
//! ```text
//!            look               begin                  answered: a value
//!   unknown ───────▶ waiting ───────────▶ under way ─────────────────────▶ found
//!      ▲                ▲                     │                              │ look, when it is too old
//!      │ for room       ├─────────────────────│──────────────────────────────┘
//!      │                │ look, after a rest  │ answered: none
//!      └─ idle          └────── failed ◀──────┘
//! ```
//!
//! *Strangers* are whoever sends something from anywhere, to whom an answer would be due. They have us look for
//! addresses of their choice; so only some lookups are for them at a time, and only some of them may wait. But newcomers
//! are strangers, too, and we may look for somebody who is gone again and again; so a few lookups are theirs before ours.
//!
//! Who *was heard*, has answered a call of ours say, is there, and waits for us: what is looked up for it comes before what is for those of
//! whom nobody knows whether they are there. But it may name addresses that nobody has; so that is some of the lookups, not all.
//!
//! # Invariants
//!
//! 1. An address is looked up once at a time; no more are under way than [`Limits::at_once`], and for strangers no more
//!    than [`Limits::strangers_at_once`].
//! 2. What is waited for ([`Look::Waits`]) comes: if whatever is under way is answered, and what is
//!    [`begin`](Resolve::begin) names is looked up. While [`Limits::strangers_first`] are under way for strangers, ours before
//!    theirs, and else theirs before ours; of ours those first for which others were heard, until [`Limits::heard_first`] of these are
//!    under way; otherwise in the order of asking. So none of the three waits for all that another asks for, and
//!    what several ask for does not come later than it would for each.
//! 3. A value is no older than who asks for it wants it.
//! 4. An address that was not found rests before it is looked up again; unless others took its place, or there is reason
//!    to think that it can be found now ([`Resolve::forget`]).
//!
//! The tests below run all orders of what can happen to three addresses.

use core::time::Duration;

use heapless::Vec;

use crate::id::Time;

/// For whom an address is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Asker {
    /// For us, or for a peer that is let in.
    Us,
    /// For us, too, to reach one that was heard a moment ago: it is there.
    Heard,
    /// For one who has sent something.
    Stranger,
}

/// How many lookups there may be, and how long what follows from them counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Lookups under way.
    pub at_once: usize,
    /// Of these for strangers.
    pub strangers_at_once: usize,
    /// Of these, so many begin before any for us.
    pub strangers_first: usize,
    /// So many for those who were heard begin before others for us; with those for strangers fewer than there are.
    pub heard_first: usize,
    /// Beside these, for strangers: they wait.
    pub strangers_waiting: usize,
    /// How long an address that was not found is not looked up again.
    pub rest: Duration,
    /// How long an address is remembered that nobody asks for.
    pub kept: Duration,
}

/// What is known of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "what waits is to be handed out, see `Resolve::begin`"]
pub enum Look<V> {
    /// It was found, not too long ago.
    Found(V),
    /// It is being looked up, or will be: ask again when there is an answer.
    Waits,
    /// It was looked up a moment ago, and was not found.
    Failed,
    /// There is no room to wait in: ask again later, if at all.
    Full,
}

/// How much is known of an address, for who asks for no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Known {
    /// It was found, however long ago: what it was is better than nothing.
    Found,
    /// It is being looked up.
    Asked,
    /// It will be, for us, when others have been.
    Waits,
    /// It was looked up a moment ago, and was not found.
    Failed,
    /// It can be looked up, if it does not wait to be for strangers.
    Nothing,
}

/// Whether something can be connected to an address, without waiting for the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// The address was found.
    Reached,
    /// It is being looked up: ask again when there are answers.
    Waits,
    /// Nobody answers there.
    Lost,
    /// No network leads there: it is not looked up.
    NoRoute,
    /// There is no room to wait in.
    Full,
}

impl Reach {
    /// The same of several ways, of which one will do: whether to begin with those that are reached.
    ///
    /// All are waited for that may be reached soon, so that they begin together. When nobody has answered to the first lookup, which
    /// takes a second, those that are reached are not kept any longer: where many ways lead nowhere, looked up some at a time, there
    /// might be no moment at which all are known.
    #[must_use]
    pub fn of_all(ways: impl IntoIterator<Item = Self>) -> Self {
        let (mut any, mut lost, mut waits, mut full) = (false, false, false, false);
        for way in ways {
            match way {
                Self::Reached => any = true,
                Self::Waits => waits = true,
                Self::Lost => lost = true,
                Self::Full => full = true,
                Self::NoRoute => {}
            }
        }
        match (any, lost, waits, full) {
            (true, true, ..) | (true, _, false, false) => Self::Reached,
            (.., true) => Self::Full,
            (_, _, true, _) => Self::Waits,
            (_, true, ..) => Self::Lost,
            _ => Self::NoRoute,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Idle,
    /// For whom: us or a stranger at least; us, if it is to reach one that was heard.
    Waiting {
        us: bool,
        heard: bool,
        stranger: bool,
        turn: u64,
    },
    UnderWay {
        asker: Asker,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Entry<K, V> {
    key: K,
    found: Option<(Time, V)>,
    /// It was not found, and rests until then.
    failed: Option<Time>,
    stage: Stage,
    /// When it was last asked for.
    used: Time,
}

/// What is known of up to `N` addresses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Resolve<K, V, const N: usize> {
    entries: Vec<Entry<K, V>, N>,
    limits: Limits,
    turn: u64,
}

impl<K: Copy + Eq, V: Clone, const N: usize> Resolve<K, V, N> {
    /// Nothing is known.
    #[must_use]
    pub const fn new(limits: Limits) -> Self {
        Self { entries: Vec::new(), limits, turn: 0 }
    }

    /// What is known of an address, for one who wants to know what was so less than `within` ago. O(N).
    pub fn look(&mut self, now: Time, key: K, asker: Asker, within: Duration) -> Look<V> {
        let known = self.entries.iter().position(|entry| entry.key == key);
        if let Some(entry) = known.and_then(|at| self.entries.get_mut(at)) {
            entry.used = now;
            if let Some((at, value)) = &entry.found
                && now.since(*at) < within
            {
                return Look::Found(value.clone());
            }
            match &mut entry.stage {
                Stage::Waiting { us, heard, stranger, .. } => {
                    *us |= asker != Asker::Stranger;
                    *heard |= asker == Asker::Heard;
                    *stranger |= asker == Asker::Stranger;
                    return Look::Waits;
                }
                Stage::UnderWay { .. } => return Look::Waits,
                Stage::Idle if entry.failed.is_some_and(|until| now < until) => {
                    return Look::Failed;
                }
                Stage::Idle => {}
            }
        }
        if asker == Asker::Stranger && self.strangers_waiting() >= self.limits.strangers_waiting {
            return Look::Full;
        }
        let (heard, stranger) = (asker == Asker::Heard, asker == Asker::Stranger);
        let stage = Stage::Waiting { us: !stranger, heard, stranger, turn: self.turn };
        match known.and_then(|at| self.entries.get_mut(at)) {
            Some(entry) => entry.stage = stage,
            None => {
                self.make_room(now);
                let entry = Entry { key, found: None, failed: None, stage, used: now };
                if self.entries.push(entry).is_err() {
                    return Look::Full;
                }
            }
        }
        self.turn = self.turn.wrapping_add(1);
        Look::Waits
    }

    /// What was found when the address was last looked up, however long ago. O(N).
    #[must_use]
    pub fn last(&self, key: K) -> Option<V> {
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        entry.found.as_ref().map(|(_, value)| value.clone())
    }

    /// How much is known of the address: it is not looked up for that. O(N).
    #[must_use]
    pub fn known(&self, now: Time, key: K) -> Known {
        let Some(entry) = self.entries.iter().find(|entry| entry.key == key) else {
            return Known::Nothing;
        };
        match entry.stage {
            _ if entry.found.is_some() => Known::Found,
            Stage::UnderWay { .. } => Known::Asked,
            Stage::Waiting { us: true, .. } => Known::Waits,
            Stage::Idle if entry.failed.is_some_and(|until| now < until) => Known::Failed,
            Stage::Waiting { .. } | Stage::Idle => Known::Nothing,
        }
    }

    /// The address that is to be looked up next, if there is one and it may be now: it is under way. O(N).
    #[must_use = "it counts as under way until it is answered"]
    pub fn begin(&mut self) -> Option<K> {
        let under_way = |asker| self.count(|stage| *stage == Stage::UnderWay { asker });
        let strangers = under_way(Asker::Stranger);
        if self.count(|stage| matches!(stage, Stage::UnderWay { .. })) >= self.limits.at_once {
            return None;
        }
        let full = strangers >= self.limits.strangers_at_once;
        let first = strangers < self.limits.strangers_first;
        let soon = under_way(Asker::Heard) < self.limits.heard_first;
        // For each the first that it may be looked up for.
        let waiting = self.entries.iter_mut().filter_map(|entry| {
            let Stage::Waiting { us, heard, stranger, turn } = entry.stage else { return None };
            let may_be = stranger && !full;
            let (rank, asker) = if may_be && first {
                (0, Asker::Stranger)
            } else if heard && soon {
                (1, Asker::Heard)
            } else if us {
                (2, Asker::Us)
            } else if may_be {
                (3, Asker::Stranger)
            } else {
                return None;
            };
            Some((rank, turn, asker, entry))
        });
        let (.., asker, entry) = waiting.min_by_key(|(rank, turn, ..)| (*rank, *turn))?;
        entry.stage = Stage::UnderWay { asker };
        Some(entry.key)
    }

    /// An address that was under way has been looked up. O(N).
    pub fn answered(&mut self, now: Time, key: K, value: Option<V>) {
        let mut entries = self.entries.iter_mut();
        let under_way = |entry: &Entry<K, V>| matches!(entry.stage, Stage::UnderWay { .. });
        let Some(entry) = entries.find(|entry| entry.key == key && under_way(entry)) else {
            return;
        };
        entry.stage = Stage::Idle;
        entry.failed = value.is_none().then(|| now.after(self.limits.rest));
        entry.found = value.map(|value| (now, value));
    }

    /// What was found, or not found, of these addresses does not count any more. What is under way is answered all the
    /// same. O(N).
    pub fn forget(&mut self, which: impl Fn(&K) -> bool) {
        for entry in self.entries.iter_mut().filter(|entry| which(&entry.key)) {
            (entry.found, entry.failed) = (None, None);
        }
    }

    fn count(&self, which: impl Fn(&Stage) -> bool) -> usize {
        self.entries.iter().filter(|entry| which(&entry.stage)).count()
    }

    fn strangers_waiting(&self) -> usize {
        self.count(|stage| matches!(stage, Stage::Waiting { us: false, .. }))
    }

    /// Makes room for one more, if there is any that nobody waits for.
    fn make_room(&mut self, now: Time) {
        let kept = self.limits.kept;
        self.entries.retain(|entry| entry.stage != Stage::Idle || now.since(entry.used) < kept);
        if !self.entries.is_full() {
            return;
        }
        let entries = self.entries.iter().enumerate();
        let idle = entries.filter(|(_, entry)| entry.stage == Stage::Idle);
        if let Some((at, _)) = idle.min_by_key(|(_, entry)| entry.used) {
            self.entries.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};
    use std::vec::Vec;

    use super::*;

    const KEYS: [u8; 3] = [0, 1, 2];
    const WITHIN: Duration = Duration::from_nanos(2);
    const LIMITS: Limits = Limits {
        at_once: 2,
        strangers_at_once: 1,
        strangers_first: 0,
        heard_first: 1,
        strangers_waiting: 1,
        rest: Duration::from_nanos(2),
        kept: Duration::MAX,
    };

    /// Who waits for an address.
    type Waits = Vec<Asker>;

    /// We do, for whatever reason.
    fn is_ours(waits: &[Asker]) -> bool {
        waits.iter().any(|asker| *asker != Asker::Stranger)
    }

    /// What must be so, kept apart: by key the last answer that counts, who waits in which order, what is under way.
    #[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
    struct Model {
        last: [Option<(Time, bool)>; 3],
        waiting: Vec<(u8, Waits)>,
        under_way: Vec<(u8, Asker)>,
    }

    #[derive(Debug, Clone, PartialEq, Eq, Hash)]
    struct World<const N: usize> {
        resolve: Resolve<u8, (), N>,
        model: Model,
        /// Who asks.
        askers: [Asker; 2],
        now: Time,
    }

    impl<const N: usize> World<N> {
        fn look(&mut self, key: u8, asker: Asker) {
            let (model, now) = (&mut self.model, self.now);
            let said = self.resolve.look(now, key, asker, WITHIN);
            let busy = model.under_way.iter().any(|it| it.0 == key);
            let waits = model.waiting.iter_mut().find(|it| it.0 == key);
            let last = model.last[usize::from(key)];
            let fresh = last.is_some_and(|(at, good)| good && now.since(at) < WITHIN);
            let rests = last.is_some_and(|(at, good)| !good && now.since(at) < LIMITS.rest);
            // One that was forgotten for room is not known to have failed, or been found.
            let knows_all = N >= KEYS.len();
            match said {
                Look::Found(()) => assert!(fresh),
                _ if knows_all && fresh => panic!("{said:?}"),
                Look::Failed => assert!(rests && !busy && waits.is_none()),
                Look::Waits if busy => {}
                Look::Waits => match waits {
                    Some((_, waits)) if waits.contains(&asker) => {}
                    Some((_, waits)) => {
                        waits.push(asker);
                        waits.sort_unstable();
                    }
                    None => {
                        assert!(!knows_all || !rests);
                        model.waiting.push((key, Vec::from([asker])));
                        assert!(self.strangers() <= LIMITS.strangers_waiting + LIMITS.at_once);
                    }
                },
                Look::Full => {
                    assert!(!busy && waits.is_none());
                    let full = model.waiting.len() + model.under_way.len() >= N;
                    let strangers = model.waiting.iter().filter(|it| !is_ours(&it.1));
                    let many = strangers.count() >= LIMITS.strangers_waiting;
                    assert!(full || (many && asker == Asker::Stranger));
                }
            }
        }

        fn strangers(&self) -> usize {
            let waiting = self.model.waiting.iter().filter(|it| !is_ours(&it.1)).count();
            let under_way = self.model.under_way.iter().filter(|it| it.1 == Asker::Stranger);
            waiting + under_way.count()
        }

        /// Returns what is under way now.
        fn take(&mut self) -> Option<u8> {
            let model = &mut self.model;
            let many = |asker| model.under_way.iter().filter(|it| it.1 == asker).count();
            let (strangers, heard) = (many(Asker::Stranger), many(Asker::Heard));
            let first_of = |asker| {
                let at = model.waiting.iter().position(|(_, waits)| waits.contains(&asker));
                at.map(|at| (at, asker))
            };
            let ours = model.waiting.iter().position(|(_, waits)| is_ours(waits));
            let ours = ours.map(|at| (at, Asker::Us));
            let soon = first_of(Asker::Heard).filter(|_| heard < LIMITS.heard_first);
            let ours = soon.or(ours);
            let theirs = first_of(Asker::Stranger);
            let theirs = theirs.filter(|_| strangers < LIMITS.strangers_at_once);
            let first = strangers < self.resolve.limits.strangers_first;
            let at = if first { theirs.or(ours) } else { ours.or(theirs) };
            let at = at.filter(|_| model.under_way.len() < LIMITS.at_once);
            let taken = at.map(|(at, asker)| (model.waiting.remove(at).0, asker));
            assert_eq!(self.resolve.begin(), taken.map(|it| it.0));
            model.under_way.extend(taken);
            taken.map(|it| it.0)
        }

        fn answer(&mut self, key: u8, good: bool) {
            self.resolve.answered(self.now, key, good.then_some(()));
            let model = &mut self.model;
            if let Some(at) = model.under_way.iter().position(|it| it.0 == key) {
                model.under_way.remove(at);
                model.last[usize::from(key)] = Some((self.now, good));
            }
        }

        /// It says of each address how much is known.
        fn check(&self) {
            let Model { last, waiting, under_way } = &self.model;
            for (key, last) in KEYS.into_iter().zip(last) {
                let is_asked = under_way.iter().any(|it| it.0 == key);
                let waits = waiting.iter().find(|it| it.0 == key).map(|it| &*it.1);
                let expected = match *last {
                    Some((_, true)) => Known::Found,
                    _ if is_asked => Known::Asked,
                    _ if waits.is_some_and(is_ours) => Known::Waits,
                    // We may ask for it, too.
                    _ if waits.is_some() => Known::Nothing,
                    Some((at, false)) if self.now.since(at) < LIMITS.rest => Known::Failed,
                    _ => Known::Nothing,
                };
                // One that was forgotten for room is not known to have been found, or not.
                let knows_all = N >= KEYS.len() || matches!(expected, Known::Asked | Known::Waits);
                let known = self.resolve.known(self.now, key);
                assert!(known == expected || !knows_all, "{known:?}, not {expected:?}");
            }
        }

        /// All that is waited for comes.
        fn drain(mut self) {
            for _ in 0..KEYS.len() {
                while self.take().is_some() {}
                for (key, _) in self.model.under_way.clone() {
                    self.answer(key, true);
                }
            }
            assert!(self.model.waiting.is_empty(), "{self:?}");
        }

        /// Everything that can happen next.
        fn next(&self) -> Vec<Self> {
            let mut all = Vec::new();
            let mut step = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                all.push(world);
            };
            for key in KEYS {
                for asker in self.askers {
                    step(&|world| world.look(key, asker));
                }
                // Also of one that nobody has asked for.
                step(&|world| world.answer(key, true));
                step(&|world| world.answer(key, false));
            }
            step(&|world| {
                world.take();
            });
            step(&|world| world.now = world.now.after(Duration::from_nanos(1)));
            step(&|world| {
                world.resolve.forget(|&key| key != 1);
                (world.model.last[0], world.model.last[2]) = (None, None);
            });
            all
        }
    }

    /// Who may ask, of two kinds, and how many strangers come first.
    const ASKERS: [([Asker; 2], usize); 4] = [
        ([Asker::Us, Asker::Stranger], 0),
        ([Asker::Us, Asker::Stranger], 1),
        ([Asker::Us, Asker::Heard], 0),
        ([Asker::Heard, Asker::Stranger], 1),
    ];

    fn explore<const N: usize>(
        kept: Duration,
        (askers, strangers_first): ([Asker; 2], usize),
        depth: u32,
    ) -> usize {
        let resolve = Resolve::new(Limits { kept, strangers_first, ..LIMITS });
        let world = World::<N> { resolve, model: Model::default(), askers, now: Time::ZERO };
        let (mut seen, mut layer) = (HashSet::new(), Vec::from([world]));
        for _ in 0..depth {
            let mut below = Vec::new();
            for world in layer {
                world.check();
                world.clone().drain();
                below.extend(world.next().into_iter().filter(|next| seen.insert(next.clone())));
            }
            layer = below;
        }
        seen.len()
    }

    #[test]
    fn all_that_is_waited_for_comes_within_its_limits() {
        for askers in ASKERS {
            let seen = explore::<3>(Duration::MAX, askers, 8);
            assert!(seen > 20_000, "{seen}");
        }
    }

    /// The same where there is no room for all, and what nobody asks for is forgotten.
    #[test]
    fn what_is_forgotten_is_looked_up_again() {
        for askers in ASKERS {
            let seen = explore::<2>(Duration::from_nanos(3), askers, 8);
            assert!(seen > 20_000, "{seen}");
        }
        let mut one = Resolve::<u8, u8, 1>::new(LIMITS);
        let mut look = |key, at| one.look(Time::from_nanos(at), key, Asker::Us, WITHIN);
        assert_eq!([look(1, 0), look(2, 0)], [Look::Waits, Look::Full]);
        assert_eq!(one.begin(), Some(1));
        one.answered(Time::ZERO, 1, Some(7));
        assert_eq!(one.look(Time::ZERO, 1, Asker::Us, WITHIN), Look::Found(7));
        // What is old is better than nothing, until it is known to be wrong.
        let late = Time::from_nanos(9);
        assert_eq!(one.look(late, 1, Asker::Us, WITHIN), Look::Waits);
        assert_eq!((one.last(1), one.begin()), (Some(7), Some(1)));
        one.answered(late, 1, None);
        assert_eq!(one.last(1), None);
        assert_eq!(one.look(late, 1, Asker::Us, WITHIN), Look::Failed);
        assert_eq!(one.look(late, 2, Asker::Us, WITHIN), Look::Waits);
    }

    /// As the platform's: eight lookups.
    const EIGHT: Limits = Limits {
        at_once: 8,
        strangers_at_once: 4,
        strangers_first: 2,
        heard_first: 4,
        strangers_waiting: 128,
        rest: Duration::from_secs(1),
        kept: Duration::from_secs(60),
    };

    /// Some have so many addresses looked up that nobody has, each again as soon as it has failed, that there is never a lookup to spare. Who comes
    /// then, of the others, is begun within as many answers as there are lookups for the first, and a stranger with the next.
    #[test]
    fn nobody_waits_for_all_that_others_ask_for() {
        const LATE: u8 = 31;
        let limits =
            Limits { strangers_waiting: 16, rest: Duration::ZERO, kept: Duration::MAX, ..EIGHT };
        use Asker::{Heard, Stranger, Us};
        // Whoever else asks for it, too, before or after that, makes nobody wait for longer.
        let cases: [(_, &[Asker], _); 9] = [
            (Us, &[Stranger], 1),
            (Us, &[Stranger, Us], 1),
            (Us, &[Us, Stranger], 1),
            (Us, &[Heard], 1),
            (Us, &[Us, Heard], 1),
            (Stranger, &[Us], 8),
            (Stranger, &[Heard], 8),
            (Heard, &[Stranger], 1),
            (Heard, &[Us], 30),
        ];
        for (many, late, most) in cases {
            for others in 1..LATE {
                let mut resolve = Resolve::<u8, (), 32>::new(limits);
                let (mut under_way, mut waited) = (VecDeque::new(), None);
                for answers in 0..100 {
                    for key in 0..others {
                        let said = resolve.look(Time::ZERO, key, many, WITHIN);
                        assert!(said == Look::Waits || many == Asker::Stranger);
                    }
                    for asker in late.iter().filter(|_| answers == 50) {
                        assert_eq!(resolve.look(Time::ZERO, LATE, *asker, WITHIN), Look::Waits);
                    }
                    while let Some(key) = resolve.begin() {
                        under_way.push_back(key);
                        if key == LATE {
                            waited = Some(answers - 50);
                        }
                    }
                    let oldest = under_way.pop_front().unwrap();
                    resolve.answered(Time::ZERO, oldest, None);
                }
                let in_time = waited.is_some_and(|waited| waited <= most);
                assert!(in_time, "{waited:?} answers for {late:?}, beside {others}");
            }
        }
    }

    /// Hosts are called of which nobody is there, however many; each of their addresses is looked up again as soon as it may be, and so are a
    /// stranger's. One that was called with them accepts, and has any of eight NICs: it is reached before it is given up as one that has never
    /// answered, which takes 2.5 s, whether its addresses wait in the queue already or not.
    #[test]
    fn who_was_heard_is_reached_in_time_however_many_do_not_answer() {
        const LOOKUP: Duration = Duration::from_secs(1);
        const STEP: Duration = Duration::from_millis(125);
        const PATIENCE: Duration = Duration::from_millis(2500);
        const NICS: u8 = 8;
        let hosts = [0, 1, 8, 19, 40, 100];
        let cases = hosts.into_iter().flat_map(|hosts| (1..=u8::MAX).map(move |it| (hosts, it)));
        for ((hosts, good), waits) in cases.flat_map(|case| [(case, false), (case, true)]) {
            let (mut resolve, mut now) = (Resolve::<u8, (), 128>::new(EIGHT), Time::ZERO);
            let (mut under_way, mut reach) = (Vec::new(), Reach::Waits);
            let accepted = Time::ZERO.after(LOOKUP * 2 + STEP);
            while now < accepted.after(PATIENCE) && reach != Reach::Reached {
                for host in NICS..NICS + hosts {
                    let asker = if host % 8 == 7 { Asker::Stranger } else { Asker::Us };
                    let _ = resolve.look(now, host, asker, LOOKUP);
                }
                for nic in (0..NICS).filter(|_| waits && now < accepted) {
                    let _ = resolve.look(now, nic, Asker::Us, LOOKUP);
                }
                if now >= accepted {
                    let ways = (0..NICS).map(|nic| {
                        match resolve.look(now, nic, Asker::Heard, LOOKUP * 3) {
                            Look::Found(()) => Reach::Reached,
                            Look::Waits => Reach::Waits,
                            Look::Failed => Reach::Lost,
                            Look::Full => Reach::Full,
                        }
                    });
                    reach = Reach::of_all(ways);
                }
                while let Some(key) = resolve.begin() {
                    under_way.push((key, now));
                }
                now = now.after(STEP);
                under_way.retain(|&(key, since)| {
                    let found = key < NICS && good >> key & 1 == 1;
                    let is_over = found || now.since(since) >= LOOKUP;
                    if is_over {
                        resolve.answered(now, key, found.then_some(()));
                    }
                    !is_over
                });
            }
            assert_eq!(reach, Reach::Reached, "{good:b} of one beside {hosts}");
        }
    }

    /// All ways of up to four: nobody is kept who is reached, but for what may be reached with it soon.
    #[test]
    fn of_several_ways_those_that_lead_nowhere_keep_nobody() {
        const ALL: [Reach; 5] =
            [Reach::Reached, Reach::Waits, Reach::Lost, Reach::NoRoute, Reach::Full];
        for count in 0..=4_u32 {
            for number in 0..5_usize.pow(count) {
                let ways: Vec<_> = (0..count).map(|at| ALL[number / 5_usize.pow(at) % 5]).collect();
                let has = |reach| ways.contains(&reach);
                let pending = has(Reach::Waits) || has(Reach::Full);
                let expected = if has(Reach::Reached) && (has(Reach::Lost) || !pending) {
                    Reach::Reached
                } else if has(Reach::Full) {
                    Reach::Full
                } else if has(Reach::Waits) {
                    Reach::Waits
                } else if has(Reach::Lost) {
                    Reach::Lost
                } else {
                    Reach::NoRoute
                };
                assert_eq!(Reach::of_all(ways.iter().copied()), expected, "{ways:?}");
            }
        }
    }

    /// Eight ways, looked up four at a time; those that lead nowhere take as long to find that out as they rest. Whichever these are, there
    /// is a moment to begin with the others, soon after the first round of lookups.
    #[test]
    fn many_ways_that_lead_nowhere_keep_no_other() {
        const LOOKUP: Duration = Duration::from_secs(1);
        let limits = Limits {
            at_once: 4,
            strangers_at_once: 4,
            strangers_first: 2,
            heard_first: 0,
            strangers_waiting: 8,
            rest: LOOKUP,
            kept: LOOKUP,
        };
        for good in 1..=u8::MAX {
            let (mut resolve, mut now) = (Resolve::<u8, (), 8>::new(limits), Time::ZERO);
            let mut under_way = Vec::new();
            let mut reach = Reach::Waits;
            while now <= Time::ZERO.after(LOOKUP * 5 / 4) && reach != Reach::Reached {
                let ways: Vec<_> = (0..8)
                    .map(|key| match resolve.look(now, key, Asker::Stranger, LOOKUP) {
                        Look::Found(()) => Reach::Reached,
                        Look::Waits => Reach::Waits,
                        Look::Failed => Reach::Lost,
                        Look::Full => Reach::Full,
                    })
                    .collect();
                reach = Reach::of_all(ways);
                while let Some(key) = resolve.begin() {
                    under_way.push((key, now));
                }
                now = now.after(LOOKUP / 8);
                under_way.retain(|&(key, since)| {
                    let found = good >> key & 1 == 1;
                    let is_over = found || now.since(since) >= LOOKUP;
                    if is_over {
                        resolve.answered(now, key, found.then_some(()));
                    }
                    !is_over
                });
            }
            assert_eq!(reach, Reach::Reached, "{good:b}");
        }
    }
}
