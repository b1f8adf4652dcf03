//! How a waiter sleeps without missing its wake-up.
//!
//! State words only: the platform makes the calls that put a thread to sleep (a futex, a file
//! descriptor) and that wake it. [`Doorbell`] is for an engine that looks for work of many kinds in
//! many places; [`Completion`] for one thing that happens once.
//!
//! # Invariants
//!
//! 1. If work was made visible before [`Doorbell::ring`], then either the sleeper's last look (after
//!    [`Doorbell::prepare_sleep`]) sees the work, or a `ring` says that the sleeper must be woken.
//! 2. A [`Completion`] goes Empty, Pending, Done, Empty in a circle, with one read-modify-write for
//!    each step; it is completed once in each tenancy, and a ticket of another tenancy neither
//!    completes nor sees it.
//! 3. Whoever announced itself as a sleeper before the completion is woken: [`Completion::complete`]
//!    says so.
//!
//! The tests below check 2 and 3 for every short sequence; the loom models of `verification/loom`
//! check all three with waiters that really sleep.

use core::fmt;

use crate::sync::{AtomicU32, Ordering, const_unless_loom, fence};

/// A word in which one engine says that it is about to sleep, to any number of producers.
///
/// ```text
///   producer                          sleeper
///   make work visible                 prepare_sleep      announce, then fence
///   ring            fence, then look  look for work      none: sleep. Some: awake
/// ```
///
/// Two words are involved, the work and the announcement, and each side writes one and then reads the
/// other. Only `SeqCst` fences between the two make it impossible that both miss: whichever fence
/// comes second, its side sees what the other wrote.
///
/// It may lie in memory shared between processes: four bytes, any bits are valid (0 is awake, the
/// rest is sleeping), and a hostile peer can only cost itself a wake-up, or us a needless one.
#[derive(Debug)]
#[repr(transparent)]
pub struct Doorbell(AtomicU32);

impl Doorbell {
    const AWAKE: u32 = 0;
    const ASLEEP: u32 = 1;

    const_unless_loom! {
        /// The doorbell of an engine that is awake.
        #[must_use]
        pub fn new() -> Self {
            Self(AtomicU32::new(Self::AWAKE))
        }
    }

    /// Announces that the caller, the one sleeper, is about to sleep.
    ///
    /// It then looks for work once more, everywhere. If there is some it calls [`Doorbell::awake`] and
    /// goes on, else it sleeps until the platform wakes it.
    pub fn prepare_sleep(&self) {
        // An exchange, not a store: a producer's exchange that took down an earlier announcement comes
        // before this one for all threads, so that whoever looks after its fence sees this one.
        self.0.swap(Self::ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement, after sleep or instead of it.
    pub fn awake(&self) {
        // Relaxed: a producer that still reads the announcement wakes somebody who is awake.
        self.0.store(Self::AWAKE, Ordering::Relaxed);
    }

    /// Tells the sleeper of work that the caller has made visible.
    ///
    /// `true` means that it sleeps, or is about to: the caller, and no other, must wake it. A fence and
    /// a load while it is awake.
    #[must_use = "if `true`, the sleeper must be woken"]
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders the work before this load; the platform's wake-up orders the
        // rest. The exchange lets one of many producers pay for the wake-up.
        self.0.load(Ordering::Relaxed) != Self::AWAKE
            && self.0.swap(Self::AWAKE, Ordering::Relaxed) != Self::AWAKE
    }
}

impl Default for Doorbell {
    fn default() -> Self {
        Self::new()
    }
}

/// One tenancy of a [`Completion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u32);

impl Ticket {
    /// Which tenancy of its completion's: 21 bits.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.0 / GENERATION_STEP
    }
}

/// What a ticket's tenancy has come to.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Progress {
    /// Not completed. While the word has this value, sleeping on it is safe.
    Pending {
        /// The word as it is, for a futex to compare.
        word: u32,
    },
    /// Completed.
    Done {
        /// What [`Completion::complete`] was given.
        code: u8,
    },
    /// The tenancy has ended.
    Stale,
}

/// What [`Completion::complete`] did.
#[must_use = "`Wake` must be acted on, or somebody sleeps for ever"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Completed {
    /// Somebody announced a sleep: wake all who sleep on the word, and the registered waker.
    Wake,
    /// Nobody sleeps.
    Quiet,
    /// Nothing changed: it was complete already, or the tenancy has ended.
    TooLate,
}

/// A word that says once that something has ended, and how.
///
/// ```text
///            begin            complete(code)           reset
///   Empty ──────────▶ Pending ──────────────▶ Done ──────────▶ Empty, next generation
///                      │    ▲ announce_sleeper                   ▲
///                      └────┴─────────── reset (given up) ───────┘
///
///   word, 32 bits: generation (21) | sleeper (1) | state (2) | code (8)
/// ```
///
/// More than a code fits beside it: what the completer wrote before `complete` is visible to whoever
/// sees `Done`.
///
/// The sleeper bit also stands for a `core::task::Waker`, which cannot be kept here without a lock or
/// unsafe code. The platform keeps it in a mutex beside this word: a future stores its waker first and
/// calls [`Completion::announce_sleeper`] after; the completer takes the mutex only on
/// [`Completed::Wake`], so that nobody pays for it who does not wait. A bit set by a waiter that has
/// left costs a needless wake-up.
///
/// Generations repeat after 2^21 tenancies; a ticket is not to be kept that long.
#[derive(Debug)]
#[repr(transparent)]
pub struct Completion(AtomicU32);

const GENERATION_STEP: u32 = 1 << 11;
const GENERATION: u32 = !(GENERATION_STEP - 1);
const SLEEPER: u32 = 1 << 10;
const DONE: u32 = 1 << 9;
const PENDING: u32 = 1 << 8;
const CODE: u32 = PENDING - 1;

impl Completion {
    const_unless_loom! {
        /// An empty one.
        #[must_use]
        pub fn new() -> Self {
            Self(AtomicU32::new(0))
        }
    }

    /// Begins a tenancy: Empty to Pending; `None` if it is not empty. Any number of threads may try.
    #[must_use]
    pub fn begin(&self) -> Option<Ticket> {
        let word = self.0.load(Ordering::Relaxed);
        if word & !GENERATION != 0 {
            return None;
        }
        // Acquire: what the last tenant did before its `reset` comes before what we do. One try is
        // enough: from Empty the word can only be changed by another `begin`.
        let begun =
            self.0.compare_exchange(word, word | PENDING, Ordering::Acquire, Ordering::Relaxed);
        begun.ok().map(Ticket)
    }

    /// The ticket of the tenancy that is pending; `None` if none is.
    #[must_use]
    pub fn pending(&self) -> Option<Ticket> {
        let word = self.0.load(Ordering::Acquire);
        (word & PENDING != 0).then_some(Ticket(word & GENERATION))
    }

    /// Looks, and announces nothing. After `Done`, what the completer wrote before is visible.
    pub fn poll(&self, ticket: Ticket) -> Progress {
        Self::progress(self.0.load(Ordering::Acquire), ticket)
    }

    /// Announces a sleep: from now on `complete` says [`Completed::Wake`].
    ///
    /// If still pending, the caller may sleep as long as the word is the one returned.
    pub fn announce_sleeper(&self, ticket: Ticket) -> Progress {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            let progress = Self::progress(word | SLEEPER, ticket);
            if !matches!(progress, Progress::Pending { .. }) || word & SLEEPER != 0 {
                return progress;
            }
            // Release: the waker that the caller registered is visible to the completer, whose
            // exchange reads this one's bit. Acquire on failure: that may be the completion.
            match self.0.compare_exchange_weak(
                word,
                word | SLEEPER,
                Ordering::Release,
                Ordering::Acquire,
            ) {
                Ok(_) => return progress,
                Err(seen) => word = seen,
            }
        }
    }

    /// Completes the tenancy with `code`: Pending to Done.
    pub fn complete(&self, ticket: Ticket, code: u8) -> Completed {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & GENERATION != ticket.0 || word & PENDING == 0 {
                return Completed::TooLate;
            }
            let done = ticket.0 | DONE | u32::from(code);
            // Release: whoever sees `Done` sees what came before it. Acquire: see the announcement.
            match self.0.compare_exchange_weak(word, done, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) if word & SLEEPER != 0 => return Completed::Wake,
                Ok(_) => return Completed::Quiet,
                Err(seen) => word = seen,
            }
        }
    }

    /// Ends the tenancy, completed or given up: Empty, with the next generation. `false` if the
    /// ticket is of another tenancy, or ended before.
    ///
    /// For the tenancy's owner, once nobody sleeps on it.
    #[must_use = "`false` means that the ticket was not the tenancy's"]
    pub fn reset(&self, ticket: Ticket) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if word & GENERATION != ticket.0 || word & (PENDING | DONE) == 0 {
                return false;
            }
            let empty = ticket.0.wrapping_add(GENERATION_STEP);
            // Release: what this tenant did comes before what the next one does.
            match self.0.compare_exchange_weak(word, empty, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(seen) => word = seen,
            }
        }
    }

    /// The word itself, for a futex to sleep on and to wake.
    #[must_use]
    pub const fn word(&self) -> &WakeWord {
        &self.0
    }

    fn progress(word: u32, ticket: Ticket) -> Progress {
        if word & GENERATION != ticket.0 {
            Progress::Stale
        } else if word & DONE != 0 {
            Progress::Done { code: (word & CODE) as u8 }
        } else if word & PENDING != 0 {
            Progress::Pending { word }
        } else {
            Progress::Stale
        }
    }
}

/// What a futex sleeps on.
pub type WakeWord = AtomicU32;

impl Default for Completion {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ticket {}", self.0 / GENERATION_STEP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doorbell_wakes_once_for_each_announcement() {
        let bell = Doorbell::new();
        assert!(!bell.ring());
        bell.prepare_sleep();
        assert!(bell.ring());
        assert!(!bell.ring());
        bell.prepare_sleep();
        bell.awake();
        assert!(!bell.ring());
    }

    #[test]
    fn a_doorbell_with_hostile_bits_is_one_that_sleeps() {
        for bits in [1, 2, 1 << 31, u32::MAX] {
            let bell = Doorbell(AtomicU32::new(bits));
            assert!(bell.ring());
            assert!(!bell.ring());
        }
    }

    /// What a completion is, told plainly.
    #[derive(Clone, Copy, PartialEq)]
    enum Naive {
        Empty,
        Pending { sleeper: bool },
        Done(u8),
    }

    #[derive(Clone, Copy)]
    enum Call {
        Begin,
        Announce,
        Complete(u8),
        Reset,
        AnnounceOld,
        CompleteOld,
        ResetOld,
    }

    const CALLS: [Call; 8] = [
        Call::Begin,
        Call::Announce,
        Call::Complete(0),
        Call::Complete(255),
        Call::Reset,
        Call::AnnounceOld,
        Call::CompleteOld,
        Call::ResetOld,
    ];

    fn step(real: &Completion, naive: &mut Naive, now: &mut Ticket, old: Ticket, call: Call) {
        match call {
            Call::Begin => {
                let begun = real.begin();
                assert_eq!(begun.is_some(), *naive == Naive::Empty);
                if let Some(ticket) = begun {
                    assert_ne!(ticket, old);
                    (*now, *naive) = (ticket, Naive::Pending { sleeper: false });
                }
            }
            Call::Announce => {
                let progress = real.announce_sleeper(*now);
                if let Naive::Pending { sleeper } = naive {
                    *sleeper = true;
                    let word = real.word().load(Ordering::Relaxed);
                    assert_eq!(progress, Progress::Pending { word });
                }
            }
            Call::Complete(code) => {
                let expected = match *naive {
                    Naive::Pending { sleeper: true } => Completed::Wake,
                    Naive::Pending { sleeper: false } => Completed::Quiet,
                    _ => Completed::TooLate,
                };
                assert_eq!(real.complete(*now, code), expected);
                if expected != Completed::TooLate {
                    *naive = Naive::Done(code);
                }
            }
            Call::Reset => {
                assert_eq!(real.reset(*now), *naive != Naive::Empty);
                *naive = Naive::Empty;
            }
            Call::AnnounceOld => assert_eq!(real.announce_sleeper(old), Progress::Stale),
            Call::CompleteOld => assert_eq!(real.complete(old, 3), Completed::TooLate),
            Call::ResetOld => assert!(!real.reset(old)),
        }
        match (*naive, real.poll(*now)) {
            (Naive::Pending { .. }, Progress::Pending { .. }) | (Naive::Empty, Progress::Stale) => {
            }
            (Naive::Done(code), progress) => assert_eq!(progress, Progress::Done { code }),
            (_, progress) => panic!("{progress:?}"),
        }
        let pending = matches!(naive, Naive::Pending { .. }).then_some(*now);
        assert_eq!((real.pending(), real.poll(old)), (pending, Progress::Stale));
    }

    #[test]
    fn every_sequence_of_six_calls_agrees_with_the_naive_completion() {
        for number in 0..CALLS.len().pow(6) {
            // A tenancy has been, so that there is an old ticket; the generation is about to wrap.
            let real = Completion(AtomicU32::new(GENERATION));
            let old = real.begin().unwrap();
            assert!(real.reset(old));
            let (mut naive, mut now, mut rest) = (Naive::Empty, Ticket(0), number);
            for _ in 0..6 {
                step(&real, &mut naive, &mut now, old, CALLS[rest % CALLS.len()]);
                rest /= CALLS.len();
            }
        }
    }

    #[test]
    fn the_word_a_sleeper_compares_changes_with_the_completion() {
        let completion = Completion::new();
        let ticket = completion.begin().unwrap();
        let Progress::Pending { word } = completion.announce_sleeper(ticket) else {
            panic!("nobody completed it");
        };
        assert_eq!(completion.announce_sleeper(ticket), Progress::Pending { word });
        assert_eq!(completion.complete(ticket, 0), Completed::Wake);
        assert_ne!(completion.word().load(Ordering::Relaxed), word);
    }
}
