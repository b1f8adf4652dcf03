//! Completion by counting: what an immediate means, and when a count is reached.
//!
//! ```text
//!  Imm, 32 bits:          slot (14) | generation (6) | units (12)
//!  counter word, 64 bits: generation (6) | armed (1) | value (57)
//!
//!              ── arm(n), arrived < 16n ──────────────────▶
//!   Open                                                     Armed
//!   arrived    ◀── add(u), u >= missing: FIRED ────────────  missing
//!              ◀── disarm(n): 16n - missing given back ────
//!
//!   Open:  add(u) arrived + u; consume(n), and arm(n) with enough there: arrived - 16n;
//!          retire: next generation, nothing arrived
//!   Armed: add(u), u < missing: missing - u
//! ```
//!
//! A logical write, or a page, is worth [`WRITE_UNITS`] units however it was cut, so that a receiver's
//! target is a number of writes whatever the sender's NICs. This module knows neither peers' names nor
//! how a waiter sleeps: the caller of [`CounterTable::add`] that is told [`Added::Fired`] wakes it.
//!
//! # Invariants
//!
//! 1. Units are conserved: arrived = consumed + still there, under any interleaving. Nothing that came
//!    early, beyond the target, or before a [`CounterTable::disarm`] is lost.
//! 2. For each successful [`CounterTable::arm`] that returned [`Armed::Waiting`], exactly one of these
//!    happens: one `add` returns [`Added::Fired`], or one `disarm` returns [`Disarmed::Withdrawn`].
//! 3. While armed, the missing count is above 0.
//! 4. An immediate of another generation changes no count.
//! 5. Whoever learns that units were consumed or that an armed target fired sees everything that
//!    every contributor did before its `add` (on any hardware: see [`CounterSlot`]).
//!
//! The tests below check 1 to 4 for every short sequence of calls against a naive model; the loom
//! models of `verification/loom` check all five for interleavings and weak memory.

use core::fmt;

use crate::mailbox::USER_COUNTERS;
use crate::sync::{AtomicU64, Ordering, const_unless_loom};

/// Units that one logical write, or one page, is worth.
pub const WRITE_UNITS: u16 = 16;
/// The most writes that one immediate can count: `MAX_MERGED * WRITE_UNITS` fits [`MAX_IMM_UNITS`].
pub const MAX_MERGED: u16 = 255;
/// The most units that one immediate can carry.
pub const MAX_IMM_UNITS: u16 = (1 << UNIT_BITS) - 1;
/// How many counter slots an immediate can name.
pub const MAX_COUNTERS: u16 = 1 << SLOT_BITS;
/// How many generations a slot has before they repeat.
pub const GENERATIONS: u8 = 1 << GENERATION_BITS;
/// The most units that a counter holds; `arm` and `consume` refuse a larger target.
pub const MAX_UNITS: u64 = ARMED_BIT - 1;

const SLOT_BITS: u32 = 14;
const GENERATION_BITS: u32 = 6;
const UNIT_BITS: u32 = 12;
const VALUE_BITS: u32 = 57;
const ARMED_BIT: u64 = 1 << VALUE_BITS;
const GENERATION_SHIFT: u32 = VALUE_BITS + 1;

static_assertions::const_assert_eq!(SLOT_BITS + GENERATION_BITS + UNIT_BITS, 32);
static_assertions::const_assert_eq!(GENERATION_SHIFT + GENERATION_BITS, 64);
static_assertions::const_assert!(MAX_MERGED * WRITE_UNITS <= MAX_IMM_UNITS);
static_assertions::const_assert!((MAX_MERGED + 1) * WRITE_UNITS > MAX_IMM_UNITS);

/// Which counter, and which tenant of its slot: an immediate without its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImmTag(u32);

impl ImmTag {
    /// The tag of tenant `generation` of counter `slot`; `None` if either is out of range.
    #[must_use]
    pub const fn new(slot: u16, generation: u8) -> Option<Self> {
        if slot < MAX_COUNTERS && generation < GENERATIONS {
            Some(Self((slot as u32) << GENERATION_BITS | generation as u32))
        } else {
            None
        }
    }

    /// The counter's slot, below [`MAX_COUNTERS`].
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // 20 bits less 6 are 14.
    pub const fn slot(self) -> u16 {
        (self.0 >> GENERATION_BITS) as u16
    }

    /// The slot's tenant, below [`GENERATIONS`].
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // 6 bits.
    pub const fn generation(self) -> u8 {
        (self.0 & (GENERATIONS as u32 - 1)) as u8
    }

    /// The tag as it travels: 20 bits.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The tag of bits that travelled; `None` if more than 20 are used.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits >> (SLOT_BITS + GENERATION_BITS) == 0 { Some(Self(bits)) } else { None }
    }

    /// Whether the counter is a user's: the engines' own are those from [`USER_COUNTERS`] on.
    #[must_use]
    #[inline]
    pub const fn is_users(self) -> bool {
        self.0 < (USER_COUNTERS as u32) << GENERATION_BITS
    }

    /// An immediate that adds `units` to this counter; `None` above [`MAX_IMM_UNITS`].
    #[must_use]
    pub const fn with_units(self, units: u16) -> Option<Imm> {
        if units <= MAX_IMM_UNITS { Some(Imm(self.0 << UNIT_BITS | units as u32)) } else { None }
    }
}

impl fmt::Display for ImmTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "counter {}.{}", self.slot(), self.generation())
    }
}

/// The 32 bits that a write carries to its receiver's counter. Every `u32` is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Imm(u32);

impl Imm {
    /// The immediate that arrived as `bits`.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The bits to send.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Which counter.
    #[must_use]
    pub const fn tag(self) -> ImmTag {
        ImmTag(self.0 >> UNIT_BITS)
    }

    /// How many units, at most [`MAX_IMM_UNITS`].
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // 12 bits.
    pub const fn units(self) -> u16 {
        (self.0 & MAX_IMM_UNITS as u32) as u16
    }
}

impl fmt::Display for Imm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} + {} units", self.tag(), self.units())
    }
}

/// What [`CounterTable::add`] did.
#[must_use = "exactly one caller sees `Fired`, and must wake the waiter"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Added {
    /// The units are kept. (A weight of 0 adds nothing and so never fires; it is counted, too.)
    Counted,
    /// The units are kept, and this call reached the armed target.
    Fired,
    /// The immediate is of another tenant of the slot: no count changed but [`CounterTable::stale`].
    Stale,
    /// The table has no such slot; nothing changed.
    NoSuchSlot,
    /// The counter would exceed [`MAX_UNITS`]; nothing changed.
    Overflow,
}

/// What [`CounterTable::arm`] did.
#[must_use = "whoever is told `Waiting` is owed a firing, and must wait for it or disarm"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Armed {
    /// Enough had arrived; it is consumed, and nothing is armed.
    Ready,
    /// Armed: the `add` that brings the last of these units fires.
    Waiting {
        /// Units still to come, above 0.
        missing_units: u64,
    },
}

/// What [`CounterTable::disarm`] did.
#[must_use = "after `AlreadyFired` the units are consumed, and somebody is about to wake the waiter"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Disarmed {
    /// Nothing will fire. What had arrived is there again for the next `arm` or `consume`.
    Withdrawn {
        /// Units that had not come, above 0.
        missing_units: u64,
    },
    /// The target was reached first: its units are consumed.
    AlreadyFired,
}

/// Why a counter could not be used. The caller's fault, never a peer's; nothing changed.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CounterError {
    /// The table has no such slot.
    NoSuchSlot {
        /// The slot asked for.
        slot: u16,
    },
    /// The slot has another tenant now.
    Stale {
        /// The tenant asked for.
        asked: u8,
        /// The tenant there is.
        current: u8,
    },
    /// A target is armed; it must fire or be disarmed first.
    AlreadyArmed {
        /// Units that the armed target lacks.
        missing_units: u64,
    },
    /// So many writes are more than [`MAX_UNITS`].
    TooLarge {
        /// The writes asked for.
        writes: u64,
    },
    /// More units are missing than were armed, by what the caller says it had armed.
    WrongTarget {
        /// The writes that the caller said it had armed.
        writes: u64,
        /// Units that the armed target lacks.
        missing_units: u64,
    },
}

impl fmt::Display for CounterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchSlot { slot } => write!(f, "there is no counter slot {slot}"),
            Self::Stale { asked, current } => {
                write!(f, "the counter is of generation {current} now, not {asked}")
            }
            Self::AlreadyArmed { missing_units } => {
                write!(f, "somebody waits on the counter already, for {missing_units} more units")
            }
            Self::TooLarge { writes } => write!(f, "a counter cannot hold {writes} writes"),
            Self::WrongTarget { writes, missing_units } => {
                write!(f, "{missing_units} units are missing, more than the {writes} writes named")
            }
        }
    }
}

impl core::error::Error for CounterError {}

/// A count, unpacked from its word.
#[derive(Debug, Clone, Copy)]
enum Count {
    /// Units that arrived and were not consumed.
    Open(u64),
    /// Units that the armed target lacks; above 0.
    Armed(u64),
}

impl Count {
    const fn of(word: u64) -> Self {
        let value = word & MAX_UNITS;
        if word & ARMED_BIT == 0 { Self::Open(value) } else { Self::Armed(value) }
    }

    const fn pack(self, generation: u8) -> u64 {
        let bits = match self {
            Self::Open(arrived) => arrived,
            Self::Armed(missing) => ARMED_BIT | missing,
        };
        (generation as u64) << GENERATION_SHIFT | bits
    }
}

#[allow(clippy::cast_possible_truncation)] // 64 bits less 58 are 6.
const fn generation_of(word: u64) -> u8 {
    (word >> GENERATION_SHIFT) as u8
}

/// One counter: generation, whether a target is armed, and the count, in one atomic word.
///
/// # Orderings
///
/// Every change is one compare-exchange with `AcqRel`, so the word's history is one unbroken chain of
/// read-modify-writes. Each of them heads a release sequence that all later ones belong to: whoever
/// reads the word with acquire, in a change of its own or by a load, synchronizes with **every**
/// earlier contributor, not only with the last one, and sees the bytes that they saw. That holds on
/// ARM as on x86, and is what makes the last of several NICs' threads able to vouch for all. Between
/// a NIC and the thread that calls `add`, the provider's promise takes over.
#[derive(Debug)]
pub struct CounterSlot(AtomicU64);

impl CounterSlot {
    const_unless_loom! {
        /// A counter of generation 0 that nothing has arrived at.
        #[must_use]
        pub fn new() -> Self {
            Self(AtomicU64::new(0))
        }
    }

    /// Replaces the count by `next(count)` and generation `from` by `to`; with another generation than
    /// `from` there, fails with `stale(current)`.
    ///
    /// `next` is called again for as long as others change the word in between.
    #[inline]
    fn step<R, E>(
        &self,
        from: u8,
        to: u8,
        stale: impl FnOnce(u8) -> E,
        next: impl Fn(Count) -> Result<(Count, R), E>,
    ) -> Result<R, E> {
        // Relaxed: nothing is concluded from the word until the exchange below has confirmed it,
        // but for refusals, which hand nothing over.
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if generation_of(word) != from {
                return Err(stale(generation_of(word)));
            }
            let (count, outcome) = next(Count::of(word))?;
            // Release: what this caller did before (bytes polled, tallies) is published with its
            // units. Acquire: whoever fires or consumes sees what every contributor published.
            match self.0.compare_exchange_weak(
                word,
                count.pack(to),
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(outcome),
                Err(seen) => word = seen,
            }
        }
    }
}

impl Default for CounterSlot {
    fn default() -> Self {
        Self::new()
    }
}

/// Counters over storage that the caller lends: `Box<[CounterSlot]>`, an array, or a slice.
///
/// [`CounterTable::add`] is for any number of threads. Each slot has one *owner* at a time: it alone
/// arms, disarms, consumes and retires, and does not arm again before it knows how the last armed
/// target ended (two owners would disarm each other's targets; nothing worse).
#[derive(Debug)]
pub struct CounterTable<S> {
    slots: S,
    stale: AtomicU64,
}

impl<S: AsRef<[CounterSlot]>> CounterTable<S> {
    const_unless_loom! {
        /// A table of `slots`; those past [`MAX_COUNTERS`] cannot be named and are never used.
        #[must_use]
        pub fn new(slots: S) -> Self {
            Self { slots, stale: AtomicU64::new(0) }
        }
    }

    /// Counts an immediate that arrived; any number of threads may.
    ///
    /// Lock-free: one load and one exchange where nobody competes.
    #[inline]
    pub fn add(&self, imm: Imm) -> Added {
        let tag = imm.tag();
        let units = u64::from(imm.units());
        let Some(slot) = self.slots.as_ref().get(usize::from(tag.slot())) else {
            return Added::NoSuchSlot;
        };
        let added = slot.step(
            tag.generation(),
            tag.generation(),
            |_| Added::Stale,
            |count| match count {
                // Arm and surplus change in the same exchange as the count: a separate store would
                // lose what arrives in between.
                Count::Armed(missing) if units >= missing => {
                    Ok((Count::Open(units - missing), Added::Fired))
                }
                Count::Armed(missing) => Ok((Count::Armed(missing - units), Added::Counted)),
                // Both are far below 2^63, so that the sum cannot wrap.
                Count::Open(arrived) if arrived + units > MAX_UNITS => Err(Added::Overflow),
                Count::Open(arrived) => Ok((Count::Open(arrived + units), Added::Counted)),
            },
        );
        let (Ok(outcome) | Err(outcome)) = added;
        if outcome == Added::Stale {
            // Relaxed: a figure for the metrics; it orders nothing.
            self.stale.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Asks for `writes` writes: consumes them if they are there, else arms the counter for them.
    ///
    /// A target of 0 is always ready.
    ///
    /// # Errors
    ///
    /// [`CounterError`]: no such slot, another tenant, armed already, or too large.
    pub fn arm(&self, tag: ImmTag, writes: u64) -> Result<Armed, CounterError> {
        let target = units_of(writes)?;
        self.step(tag, tag.generation(), |count| match count {
            Count::Armed(missing_units) => Err(CounterError::AlreadyArmed { missing_units }),
            Count::Open(arrived) if arrived >= target => {
                Ok((Count::Open(arrived - target), Armed::Ready))
            }
            Count::Open(arrived) => {
                let missing_units = target - arrived;
                Ok((Count::Armed(missing_units), Armed::Waiting { missing_units }))
            }
        })
    }

    /// Gives up waiting for the `writes` that were armed.
    ///
    /// # Errors
    ///
    /// [`CounterError`]: no such slot, another tenant, too large, or `writes` cannot be what was armed.
    pub fn disarm(&self, tag: ImmTag, writes: u64) -> Result<Disarmed, CounterError> {
        let target = units_of(writes)?;
        self.step(tag, tag.generation(), |count| match count {
            Count::Open(arrived) => Ok((Count::Open(arrived), Disarmed::AlreadyFired)),
            Count::Armed(missing_units) => match target.checked_sub(missing_units) {
                Some(arrived) => Ok((Count::Open(arrived), Disarmed::Withdrawn { missing_units })),
                None => Err(CounterError::WrongTarget { writes, missing_units }),
            },
        })
    }

    /// Consumes `writes` writes if they are there; `false` leaves the count as it was.
    ///
    /// # Errors
    ///
    /// [`CounterError`]: no such slot, another tenant, armed, or too large.
    pub fn consume(&self, tag: ImmTag, writes: u64) -> Result<bool, CounterError> {
        let target = units_of(writes)?;
        self.step(tag, tag.generation(), |count| match count {
            Count::Armed(missing_units) => Err(CounterError::AlreadyArmed { missing_units }),
            Count::Open(arrived) => match arrived.checked_sub(target) {
                Some(rest) => Ok((Count::Open(rest), true)),
                None => Ok((Count::Open(arrived), false)),
            },
        })
    }

    /// Ends this tenancy: immediates sent to `tag` are stale from now on. Returns the units left over.
    ///
    /// The next tenant's tag is [`CounterTable::tag`]. Generations repeat after [`GENERATIONS`]
    /// tenancies: a peer that may hold a tag that old is to be disconnected first.
    ///
    /// # Errors
    ///
    /// [`CounterError`]: no such slot, another tenant, or armed.
    pub fn retire(&self, tag: ImmTag) -> Result<u64, CounterError> {
        let next = (tag.generation() + 1) % GENERATIONS;
        self.step(tag, next, |count| match count {
            Count::Armed(missing_units) => Err(CounterError::AlreadyArmed { missing_units }),
            Count::Open(arrived) => Ok((Count::Open(0), arrived)),
        })
    }

    /// Units that arrived and that neither a `consume` nor an armed target has claimed.
    ///
    /// # Errors
    ///
    /// [`CounterError`]: no such slot, or another tenant.
    pub fn available(&self, tag: ImmTag) -> Result<u64, CounterError> {
        Ok(match self.look(tag)? {
            Count::Open(arrived) => arrived,
            Count::Armed(_) => 0,
        })
    }

    /// Units that the armed target lacks; `None` if nothing is armed.
    ///
    /// For its owner, `None` after [`Armed::Waiting`] means that the target fired, and that the bytes
    /// of all its writes are visible.
    ///
    /// # Errors
    ///
    /// [`CounterError`]: no such slot, or another tenant.
    pub fn missing(&self, tag: ImmTag) -> Result<Option<u64>, CounterError> {
        Ok(match self.look(tag)? {
            Count::Open(_) => None,
            Count::Armed(missing) => Some(missing),
        })
    }

    /// The tag of the slot's current tenant; `None` if there is no such slot.
    #[must_use]
    pub fn tag(&self, slot: u16) -> Option<ImmTag> {
        let word = self.slots.as_ref().get(usize::from(slot))?.0.load(Ordering::Acquire);
        ImmTag::new(slot, generation_of(word))
    }

    /// How many immediates of a stale generation have arrived, all slots together.
    #[must_use]
    pub fn stale(&self) -> u64 {
        self.stale.load(Ordering::Relaxed)
    }

    /// How many slots an immediate can name in this table.
    #[must_use]
    pub fn slots(&self) -> u16 {
        u16::try_from(self.slots.as_ref().len()).map_or(MAX_COUNTERS, |len| len.min(MAX_COUNTERS))
    }

    fn slot(&self, tag: ImmTag) -> Result<&CounterSlot, CounterError> {
        let slot = tag.slot();
        self.slots.as_ref().get(usize::from(slot)).ok_or(CounterError::NoSuchSlot { slot })
    }

    fn step<R>(
        &self,
        tag: ImmTag,
        to: u8,
        next: impl Fn(Count) -> Result<(Count, R), CounterError>,
    ) -> Result<R, CounterError> {
        let asked = tag.generation();
        self.slot(tag)?.step(asked, to, |current| CounterError::Stale { asked, current }, next)
    }

    fn look(&self, tag: ImmTag) -> Result<Count, CounterError> {
        // Acquire: with the release sequence of all changes, this sees what contributors published.
        let word = self.slot(tag)?.0.load(Ordering::Acquire);
        let (asked, current) = (tag.generation(), generation_of(word));
        if asked == current {
            Ok(Count::of(word))
        } else {
            Err(CounterError::Stale { asked, current })
        }
    }
}

fn units_of(writes: u64) -> Result<u64, CounterError> {
    let units = writes.checked_mul(u64::from(WRITE_UNITS)).filter(|units| *units <= MAX_UNITS);
    units.ok_or(CounterError::TooLarge { writes })
}

/// A word of a tally table. What it holds is the table's to know.
#[derive(Debug)]
pub struct Tally(AtomicU64);

impl Tally {
    const_unless_loom! {
        /// Nothing sent.
        #[must_use]
        pub fn new() -> Self {
            Self(AtomicU64::new(0))
        }
    }
}

impl Default for Tally {
    fn default() -> Self {
        Self::new()
    }
}

/// Words of a row before those of its peers: which tenant has the slot, and whose the peers' words are.
const ROW_HEAD: usize = 2;

/// Words that the tallies of a counter slot take, for so many `peers`.
#[must_use]
pub const fn tally_words(peers: u16) -> usize {
    ROW_HEAD + peers as usize
}

/// Why tallies could not be made. The caller's fault; nothing changed.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TallyError {
    /// There are no peers, or the storage is not a whole number of rows of [`tally_words`] words.
    NotWholeRows {
        /// Words lent.
        words: usize,
        /// Peers in a row.
        peers: u16,
    },
}

impl fmt::Display for TallyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::NotWholeRows { words, peers } = self;
        write!(f, "{words} words are not whole rows of tallies for {peers} peers")
    }
}

impl core::error::Error for TallyError {}

/// Makes the two ends of a tally table over `storage`, a row of [`tally_words`] for each counter slot.
///
/// `S` is something that can be held twice: `Arc<[Tally]>`, or `&[Tally]`.
///
/// # Errors
///
/// [`TallyError::NotWholeRows`].
pub fn tallies<S: AsRef<[Tally]> + Clone>(
    storage: S,
    peers: u16,
) -> Result<(TallyWriter<S>, Tallies<S>), TallyError> {
    let words = storage.as_ref().len();
    if peers == 0 || !words.is_multiple_of(tally_words(peers)) {
        return Err(TallyError::NotWholeRows { words, peers });
    }
    let reader = Tallies { storage, peers };
    Ok((TallyWriter { shared: reader.clone() }, reader))
}

/// The end of a tally table that records; there is one, and it belongs to the thread that polls.
///
/// Being alone it needs no read-modify-write: recording costs loads and a store. (Two writers over
/// the same storage would lose units of each other's; nothing worse.)
#[derive(Debug)]
pub struct TallyWriter<S> {
    shared: Tallies<S>,
}

impl<S: AsRef<[Tally]>> TallyWriter<S> {
    /// Records what peer number `peer` sent; `false`, and nothing, if there is no such slot or peer, or another tenant has the slot.
    ///
    /// To be called before [`CounterTable::add`], whose release then publishes the tally: whoever is
    /// told that the target fired sees the tallies that led there. O(peers) for a tenant's first, else constant.
    #[inline]
    pub fn record(&mut self, imm: Imm, peer: u16) -> bool {
        let Some(Row { tenant, tallied, peers }) = self.shared.row(imm.tag().slot()) else {
            return false;
        };
        let Some(own) = peers.get(usize::from(peer)) else {
            return false;
        };
        // Acquire: with what the slot's owner did before it handed the slot on. That another has it by now is no matter: what is
        // recorded below is then recorded as its tenant's that `now` names.
        let now = tenant.0.load(Ordering::Acquire);
        if generation_at(now) != imm.tag().generation() {
            return false;
        }
        // Relaxed, here and below: this is the only writer.
        if tallied.0.load(Ordering::Relaxed) != now {
            for word in peers {
                word.0.store(0, Ordering::Relaxed);
            }
            // Release: whoever sees that the words are this tenant's finds none of another's.
            tallied.0.store(now, Ordering::Release);
        }
        let units = own.0.load(Ordering::Relaxed);
        // Release: who reads the tally alone finds the bytes of what it counts, too.
        own.0.store(units.saturating_add(u64::from(imm.units())), Ordering::Release);
        true
    }
}

/// The end of a tally table that is read, by any number of threads, while the writer records.
///
/// Tallies are of a slot's tenant: what is recorded late for the last one, while its slot is handed on, is not the next one's.
/// So each row says which tenant its words are of, counted without end (six bits of a tag come again), and are the writer's to
/// begin anew.
#[derive(Debug, Clone)]
pub struct Tallies<S> {
    storage: S,
    peers: u16,
}

/// The tallies of a counter slot.
struct Row<'a> {
    /// Tenants that the slot has had before this one. The slot's owner writes it.
    tenant: &'a Tally,
    /// Whose the words of `peers` are. The writer writes it, and them.
    tallied: &'a Tally,
    peers: &'a [Tally],
}

impl<S: AsRef<[Tally]>> Tallies<S> {
    /// Units that peer number `peer` has sent to the tenant of counter `slot`; `None` if either does not exist. The bytes that they announce
    /// are visible.
    #[must_use]
    pub fn units(&self, slot: u16, peer: u16) -> Option<u64> {
        let row = self.row(slot)?;
        let word = row.peers.get(usize::from(peer))?;
        Some(if row.is_tenants() { word.0.load(Ordering::Acquire) } else { 0 })
    }

    /// Units that all peers together have sent to the tenant of counter `slot`; `None` if it does not exist.
    ///
    /// Derived from the peers' tallies, one load each.
    #[must_use]
    pub fn total(&self, slot: u16) -> Option<u64> {
        let row = self.row(slot)?;
        if !row.is_tenants() {
            return Some(0);
        }
        let units = row.peers.iter().map(|tally| tally.0.load(Ordering::Relaxed));
        Some(units.fold(0, u64::saturating_add))
    }

    /// The tenant with this tag goes: what is recorded from now on is the next one's, which begins with nothing. To be called by
    /// the slot's owner after [`CounterTable::retire`], before the slot is given to another. `false`, and nothing changes, if
    /// there is no such slot, or it is another's.
    pub fn retire(&self, tag: ImmTag) -> bool {
        let Some(Row { tenant, .. }) = self.row(tag.slot()) else {
            return false;
        };
        // Relaxed: the owner alone writes it.
        let now = tenant.0.load(Ordering::Relaxed);
        if generation_at(now) != tag.generation() {
            return false;
        }
        tenant.0.store(now.wrapping_add(1), Ordering::Release);
        true
    }

    /// How many peers each row has.
    #[must_use]
    pub const fn peers(&self) -> u16 {
        self.peers
    }

    fn row(&self, slot: u16) -> Option<Row<'_>> {
        let words = tally_words(self.peers);
        let first = usize::from(slot).checked_mul(words)?;
        match self.storage.as_ref().get(first..first.checked_add(words)?)? {
            [tenant, tallied, peers @ ..] => Some(Row { tenant, tallied, peers }),
            _ => None,
        }
    }
}

impl Row<'_> {
    /// Whether the words are of the tenant that has the slot.
    fn is_tenants(&self) -> bool {
        // Relaxed: whoever asks has the slot, or was given its tag by who has. Acquire: of the words as they were begun anew, or later.
        self.tenant.0.load(Ordering::Relaxed) == self.tallied.0.load(Ordering::Acquire)
    }
}

/// The generation of a slot's tenant, which comes after so many others.
#[allow(clippy::cast_possible_truncation)] // Below GENERATIONS.
const fn generation_at(tenant: u64) -> u8 {
    (tenant % GENERATIONS as u64) as u8
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::sync::Arc;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn tag(slot: u16, generation: u8) -> ImmTag {
        ImmTag::new(slot, generation).unwrap()
    }

    fn imm(slot: u16, generation: u8, units: u16) -> Imm {
        tag(slot, generation).with_units(units).unwrap()
    }

    fn table(slots: usize) -> CounterTable<Box<[CounterSlot]>> {
        CounterTable::new((0..slots).map(|_| CounterSlot::new()).collect())
    }

    #[test]
    fn every_tag_survives_the_wire_with_the_edge_weights() {
        for slot in 0..MAX_COUNTERS {
            for generation in 0..GENERATIONS {
                let tag = tag(slot, generation);
                assert_eq!((tag.slot(), tag.generation()), (slot, generation));
                assert_eq!(ImmTag::from_bits(tag.bits()), Some(tag));
                for units in [0, 1, 16, 4080, 4095] {
                    let bits = tag.with_units(units).unwrap().bits();
                    // The layout of the contract, spelled out.
                    let (slot, generation) = (u32::from(slot), u32::from(generation));
                    assert_eq!(bits, slot * 262_144 + generation * 4096 + u32::from(units));
                    let imm = Imm::from_bits(bits);
                    assert_eq!((imm.tag(), imm.units()), (tag, units));
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_an_immediate_is_refused() {
        assert_eq!(ImmTag::new(1 << 14, 0), None);
        assert_eq!(ImmTag::new(0, 64), None);
        assert_eq!(ImmTag::from_bits(1 << 20), None);
        assert_eq!(tag(0, 0).with_units(4096), None);
    }

    /// What a counter is, told plainly: everything that came, everything that went, and who waits.
    #[derive(Clone, Default)]
    struct Naive {
        generation: u8,
        came: u64,
        went: u64,
        armed: Option<u64>,
        stale: u64,
    }

    impl Naive {
        fn missing(&self) -> Option<u64> {
            self.armed.map(|target| target - (self.came - self.went))
        }

        fn add(&mut self, generation: u8, units: u64) -> Added {
            if generation != self.generation {
                self.stale += 1;
                return Added::Stale;
            }
            self.came += units;
            match self.armed {
                Some(target) if self.came - self.went >= target => {
                    self.went += target;
                    self.armed = None;
                    Added::Fired
                }
                _ => Added::Counted,
            }
        }

        fn check(&self, generation: u8) -> Result<(), CounterError> {
            let current = self.generation;
            if generation == current {
                Ok(())
            } else {
                Err(CounterError::Stale { asked: generation, current })
            }
        }

        fn check_open(&self, generation: u8) -> Result<(), CounterError> {
            self.check(generation)?;
            match self.missing() {
                Some(missing_units) => Err(CounterError::AlreadyArmed { missing_units }),
                None => Ok(()),
            }
        }

        fn consume(&mut self, generation: u8, writes: u64) -> Result<bool, CounterError> {
            self.check_open(generation)?;
            let enough = self.came - self.went >= 16 * writes;
            self.went += if enough { 16 * writes } else { 0 };
            Ok(enough)
        }

        fn arm(&mut self, generation: u8, writes: u64) -> Result<Armed, CounterError> {
            if self.consume(generation, writes)? {
                return Ok(Armed::Ready);
            }
            self.armed = Some(16 * writes);
            Ok(Armed::Waiting { missing_units: self.missing().unwrap() })
        }

        fn disarm(&mut self, generation: u8, writes: u64) -> Result<Disarmed, CounterError> {
            self.check(generation)?;
            let Some(missing_units) = self.missing() else {
                return Ok(Disarmed::AlreadyFired);
            };
            if missing_units > 16 * writes {
                return Err(CounterError::WrongTarget { writes, missing_units });
            }
            // A wrong number that is not impossible changes what is given back: the caller's fault,
            // which the sequences below do not commit.
            self.armed = None;
            Ok(Disarmed::Withdrawn { missing_units })
        }

        fn retire(&mut self, generation: u8) -> Result<u64, CounterError> {
            self.check_open(generation)?;
            let left = self.came - self.went;
            let generation = (self.generation + 1) % 64;
            *self = Self { generation, stale: self.stale, ..Self::default() };
            Ok(left)
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Call {
        Add(u16),
        AddStale,
        Arm(u64),
        Disarm,
        Consume(u64),
        ConsumeStale,
        Retire,
    }

    const CALLS: [Call; 14] = [
        Call::Add(0),
        Call::Add(5),
        Call::Add(11),
        Call::Add(16),
        Call::Add(40),
        Call::AddStale,
        Call::Arm(0),
        Call::Arm(1),
        Call::Arm(2),
        Call::Disarm,
        Call::Consume(0),
        Call::Consume(1),
        Call::ConsumeStale,
        Call::Retire,
    ];

    /// Makes `call` on both, and compares all that can be seen.
    fn step(real: &CounterTable<Box<[CounterSlot]>>, naive: &mut Naive, call: Call, armed: u64) {
        let generation = naive.generation;
        let other = (generation + 63) % 64;
        let (now, old) = (tag(1, generation), tag(1, other));
        match call {
            Call::Add(units) => assert_eq!(
                real.add(now.with_units(units).unwrap()),
                naive.add(generation, u64::from(units))
            ),
            Call::AddStale => {
                assert_eq!(real.add(old.with_units(16).unwrap()), naive.add(other, 16));
            }
            Call::Arm(writes) => assert_eq!(real.arm(now, writes), naive.arm(generation, writes)),
            Call::Disarm => {
                assert_eq!(real.disarm(now, armed), naive.disarm(generation, armed));
            }
            Call::Consume(writes) => {
                assert_eq!(real.consume(now, writes), naive.consume(generation, writes));
            }
            Call::ConsumeStale => assert_eq!(real.consume(old, 0), naive.consume(other, 0)),
            Call::Retire => assert_eq!(real.retire(now), naive.retire(generation)),
        }
        let now = tag(1, naive.generation);
        assert_eq!(real.tag(1), Some(now));
        assert_eq!(real.missing(now), Ok(naive.missing()));
        let open = if naive.armed.is_some() { 0 } else { naive.came - naive.went };
        assert_eq!(real.available(now), Ok(open));
        assert_eq!(real.stale(), naive.stale);
    }

    #[test]
    fn every_sequence_of_five_calls_agrees_with_the_naive_counter() {
        let mut sequences = 0;
        for number in 0..CALLS.len().pow(5) {
            let (real, mut naive) = (table(2), Naive::default());
            let mut rest = number;
            for _ in 0..5 {
                // `Disarm` names the target that is armed; when none is, any number does.
                let armed = naive.armed.map_or(1, |units| units / 16);
                step(&real, &mut naive, CALLS[rest % CALLS.len()], armed);
                rest /= CALLS.len();
            }
            assert_eq!(real.available(tag(0, 0)), Ok(0), "the neighbour was touched");
            sequences += 1;
        }
        assert_eq!(sequences, 537_824);
    }

    proptest! {
        #[test]
        fn long_sequences_agree_with_the_naive_counter(
            picks in proptest::collection::vec((0usize..CALLS.len(), 0u16..=4095, 0u64..600), 1..400)
        ) {
            let (real, mut naive) = (table(2), Naive::default());
            for (pick, units, writes) in picks {
                let armed = naive.armed.map_or(1, |units| units / 16);
                let call = match CALLS[pick] {
                    Call::Add(5) => Call::Add(5),
                    Call::Add(_) => Call::Add(units),
                    Call::Arm(_) => Call::Arm(writes),
                    Call::Consume(_) => Call::Consume(writes),
                    call => call,
                };
                step(&real, &mut naive, call, armed);
            }
        }
    }

    #[test]
    fn generations_come_round_after_sixty_four_tenants() {
        let counters = table(1);
        for tenant in 0..130u16 {
            let generation = u8::try_from(tenant % 64).unwrap();
            let now = tag(0, generation);
            assert_eq!(counters.tag(0), Some(now));
            assert_eq!(counters.add(imm(0, generation, 7)), Added::Counted);
            assert_eq!(counters.retire(now), Ok(7));
            let (asked, current) = (generation, (generation + 1) % 64);
            assert_eq!(counters.arm(now, 1), Err(CounterError::Stale { asked, current }));
        }
    }

    #[test]
    fn the_largest_counts_neither_wrap_nor_reach_the_next_field() {
        let counters = table(1);
        let now = tag(0, 63);
        for room in 0..40 {
            let word = Count::Open(MAX_UNITS - room).pack(63);
            counters.slots[0].0.store(word, Ordering::Relaxed);
            let added = counters.add(imm(0, 63, 20));
            assert_eq!(added == Added::Overflow, room < 20, "{room}");
            assert_eq!(added == Added::Counted, room >= 20, "{room}");
            let after = if room < 20 { MAX_UNITS - room } else { MAX_UNITS - room + 20 };
            assert_eq!(counters.available(now), Ok(after));
            assert_eq!(counters.tag(0), Some(now));
        }
        // The largest target, and one more.
        let largest = MAX_UNITS / 16;
        for writes in [largest + 1, u64::MAX / 16, u64::MAX / 16 + 1, u64::MAX] {
            assert_eq!(counters.arm(now, writes), Err(CounterError::TooLarge { writes }));
            assert_eq!(counters.consume(now, writes), Err(CounterError::TooLarge { writes }));
            assert_eq!(counters.disarm(now, writes), Err(CounterError::TooLarge { writes }));
        }
        counters.slots[0].0.store(Count::Open(0).pack(63), Ordering::Relaxed);
        let missing_units = largest * 16;
        assert_eq!(counters.arm(now, largest), Ok(Armed::Waiting { missing_units }));
        assert_eq!(counters.add(imm(0, 63, 4095)), Added::Counted);
        assert_eq!(counters.missing(now), Ok(Some(missing_units - 4095)));
        let wrong = CounterError::WrongTarget { writes: 1, missing_units: missing_units - 4095 };
        assert_eq!(counters.disarm(now, 1), Err(wrong));
        let missing_units = missing_units - 4095;
        assert_eq!(counters.disarm(now, largest), Ok(Disarmed::Withdrawn { missing_units }));
        assert_eq!(counters.available(now), Ok(4095));
    }

    #[test]
    fn a_slot_that_is_not_there_is_named() {
        let counters = table(3);
        assert_eq!(counters.slots(), 3);
        assert_eq!(counters.add(imm(3, 0, 16)), Added::NoSuchSlot);
        assert_eq!(counters.arm(tag(3, 0), 1), Err(CounterError::NoSuchSlot { slot: 3 }));
        assert_eq!(counters.retire(tag(16_383, 0)), Err(CounterError::NoSuchSlot { slot: 16_383 }));
        assert_eq!(counters.tag(3), None);
        assert_eq!(table(70_000).slots(), MAX_COUNTERS);
    }

    #[test]
    fn any_storage_will_do() {
        static COUNTERS: CounterTable<[CounterSlot; 2]> =
            CounterTable::new([const { CounterSlot::new() }; 2]);
        let lent = [const { CounterSlot::new() }; 1];
        let slice = CounterTable::new(&lent[..]);
        for outcome in [COUNTERS.add(imm(1, 0, 16)), slice.add(imm(0, 0, 16))] {
            assert_eq!(outcome, Added::Counted);
        }
        assert_eq!(COUNTERS.consume(tag(1, 0), 1), Ok(true));
    }

    #[test]
    fn threads_that_add_while_one_arms_lose_nothing() {
        const ADDERS: u64 = 3;
        const ADDS: u64 = 4000;
        let counters = table(1);
        let mut fired = 0;
        let mut waited = 0;
        std::thread::scope(|scope| {
            let adders: Vec<_> = (0..ADDERS)
                .map(|_| {
                    scope.spawn(|| {
                        let fired = |_: &u64| counters.add(imm(0, 0, 16)) == Added::Fired;
                        (0..ADDS).filter(fired).count()
                    })
                })
                .collect();
            for _ in 0..ADDERS * ADDS / 3 {
                if counters.arm(tag(0, 0), 3) != Ok(Armed::Ready) {
                    waited += 1;
                    while counters.missing(tag(0, 0)).unwrap().is_some() {
                        std::thread::yield_now();
                    }
                }
            }
            for adder in adders {
                fired += adder.join().unwrap();
            }
        });
        assert_eq!(fired, waited);
        assert_eq!(counters.available(tag(0, 0)), Ok(0));
    }

    fn rows(slots: usize, peers: u16) -> Arc<[Tally]> {
        (0..slots * tally_words(peers)).map(|_| Tally::new()).collect()
    }

    /// Programs of immediates of two peers, in three generations, and of retirements, beside a count of each tenant's own.
    #[test]
    fn tallies_name_who_sent_what_to_the_tenant() {
        const PROGRAM: u32 = 6;
        for numbered in 0..8_u32.pow(PROGRAM) {
            // Where generations come again, too.
            for first in [0, 62] {
                let mut number = numbered;
                let (mut writer, reader) = tallies(rows(2, 3), 3).unwrap();
                (0..first).for_each(|generation| assert!(reader.retire(tag(1, generation))));
                let (mut generation, mut own) = (first, [0_u64; 3]);
                let mut program = Vec::new();
                for _ in 0..PROGRAM {
                    let step = number % 8;
                    number /= 8;
                    program.push(step);
                    if step >= 6 {
                        // Of the tenant before, which is not there any more; or of this one.
                        let gone = (generation + 63) % 64;
                        assert!(!reader.retire(tag(1, gone)), "{program:?}");
                        if step == 6 {
                            assert!(reader.retire(tag(1, generation)));
                            (generation, own) = ((generation + 1) % 64, [0; 3]);
                        }
                    } else {
                        let peer = u16::from(step > 2);
                        let of = (generation + u8::try_from(step % 3).unwrap() + 63) % 64;
                        let recorded = writer.record(imm(1, of, 5), peer);
                        assert_eq!(recorded, of == generation, "{program:?}");
                        own[usize::from(peer)] += if recorded { 5 } else { 0 };
                    }
                    let found = [0, 1, 2].map(|peer| reader.units(1, peer).unwrap());
                    assert_eq!(found, own, "{program:?}");
                    assert_eq!(reader.total(1), Some(own.iter().sum()));
                    assert_eq!(reader.total(0), Some(0));
                }
            }
        }
    }

    /// A tag's generations come again after 64; tallies do not.
    #[test]
    fn tallies_do_not_come_again_with_a_generation() {
        let (mut writer, reader) = tallies(rows(1, 1), 1).unwrap();
        for tenant in 0..200_u8 {
            let generation = tenant % 64;
            assert_eq!(reader.units(0, 0), Some(0), "tenant {tenant}");
            // Nothing comes of most.
            if tenant % 64 == 3 {
                assert!(writer.record(imm(0, generation, 9), 0));
                assert_eq!(reader.units(0, 0), Some(9));
            }
            assert!(reader.retire(tag(0, generation)));
        }
    }

    #[test]
    fn tallies_refuse_what_is_not_there() {
        let storage = [const { Tally::new() }; 10];
        for peers in [0, 1, 2, 4, 7, 9, u16::MAX] {
            let refused = tallies(&storage[..], peers).map(|_| ());
            assert_eq!(refused, Err(TallyError::NotWholeRows { words: 10, peers }));
        }
        assert_eq!(tallies(&storage[..], 8).unwrap().1.peers(), 8);
        let (mut writer, reader) = tallies(&storage[..], 3).unwrap();
        assert!(!writer.record(imm(2, 0, 1), 0) && !writer.record(imm(0, 0, 1), 3));
        assert_eq!((reader.units(2, 0), reader.units(0, 3), reader.total(2)), (None, None, None));
        assert!(!reader.retire(tag(2, 0)));
        assert_eq!((reader.total(0), reader.total(1)), (Some(0), Some(0)));
    }
}
