//! The shipped counter table in a state that can be copied and compared.
//!
//! The table's words are atomics, so it is neither. A [`Counters`] keeps what was asked of the table and
//! asks it again, from the start, whenever it is needed: every word that a model looks at was made by the
//! shipped operations alone. Two are equal if all that can be seen of their tables is; that is each word
//! whole (generation, armed or not, value), and how many stale immediates came.

use std::hash::{Hash, Hasher};

use immwire_core::imm::{
    Added, Armed, CounterError, CounterSlot, CounterTable, Disarmed, Imm, ImmTag, Tally, tallies,
    tally_words,
};

/// The table itself, between two states.
pub type Table = CounterTable<Box<[CounterSlot]>>;

#[derive(Debug, Clone, Copy)]
enum Asked {
    Add(Imm, u16),
    Arm(ImmTag, u64),
    Disarm(ImmTag, u64),
    Retire(ImmTag),
}

/// What can be seen of one slot: tag, units there, units missing.
type Seen = (Option<ImmTag>, u64, Option<u64>);

/// A counter table, and the tallies beside it.
#[derive(Debug, Clone)]
pub struct Counters {
    slots: u16,
    peers: u16,
    asked: Vec<Asked>,
    seen: Vec<Seen>,
    stale: u64,
    /// Units for each slot and peer.
    tallies: Vec<u64>,
}

impl PartialEq for Counters {
    fn eq(&self, other: &Self) -> bool {
        self.seen == other.seen && self.stale == other.stale && self.tallies == other.tallies
    }
}

impl Eq for Counters {}

impl Hash for Counters {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.seen, self.stale, &self.tallies).hash(state);
    }
}

impl Counters {
    /// `slots` counters of generation 0, tallied for `peers` peers.
    #[must_use]
    pub fn new(slots: u16, peers: u16) -> Self {
        let rows = usize::from(slots) * usize::from(peers);
        let (asked, seen, tallies) = (Vec::new(), Vec::new(), vec![0; rows]);
        let mut counters = Self { slots, peers, asked, seen, stale: 0, tallies };
        let table = Table::new((0..slots).map(|_| CounterSlot::new()).collect());
        counters.look(&table);
        counters
    }

    /// An immediate of peer number `peer` arrived: tallied, then counted, as an engine does.
    pub fn add(&mut self, imm: Imm, peer: u16) -> Added {
        self.ask(Asked::Add(imm, peer), |table| table.add(imm))
    }

    /// As [`CounterTable::arm`].
    ///
    /// # Errors
    ///
    /// [`CounterError`].
    pub fn arm(&mut self, tag: ImmTag, writes: u64) -> Result<Armed, CounterError> {
        self.ask(Asked::Arm(tag, writes), |table| table.arm(tag, writes))
    }

    /// As [`CounterTable::disarm`].
    ///
    /// # Errors
    ///
    /// [`CounterError`].
    pub fn disarm(&mut self, tag: ImmTag, writes: u64) -> Result<Disarmed, CounterError> {
        self.ask(Asked::Disarm(tag, writes), |table| table.disarm(tag, writes))
    }

    /// As [`CounterTable::retire`].
    ///
    /// # Errors
    ///
    /// [`CounterError`].
    pub fn retire(&mut self, tag: ImmTag) -> Result<u64, CounterError> {
        self.ask(Asked::Retire(tag), |table| table.retire(tag))
    }

    /// The tag of the slot's tenant now.
    #[must_use]
    pub fn tag(&self, slot: u16) -> Option<ImmTag> {
        self.seen.get(usize::from(slot))?.0
    }

    /// Units there that nobody has claimed.
    #[must_use]
    pub fn available(&self, slot: u16) -> u64 {
        self.seen.get(usize::from(slot)).map_or(0, |seen| seen.1)
    }

    /// Units that the armed target lacks; `None` if nothing is armed.
    #[must_use]
    pub fn missing(&self, slot: u16) -> Option<u64> {
        self.seen.get(usize::from(slot))?.2
    }

    /// Immediates of other generations that came.
    #[must_use]
    pub const fn stale(&self) -> u64 {
        self.stale
    }

    /// Units that peer number `peer` sent to the slot's tenant.
    #[must_use]
    pub fn tally(&self, slot: u16, peer: u16) -> u64 {
        let at = usize::from(slot) * usize::from(self.peers) + usize::from(peer);
        self.tallies.get(at).copied().unwrap_or(0)
    }

    /// Asks all of it again, then `what`; and looks at what came of it.
    fn ask<R>(&mut self, what: Asked, last: impl FnOnce(&Table) -> R) -> R {
        let table = Table::new((0..self.slots).map(|_| CounterSlot::new()).collect());
        let words = usize::from(self.slots) * tally_words(self.peers);
        let storage: Vec<Tally> = (0..words).map(|_| Tally::new()).collect();
        let told = tallies(&storage[..], self.peers);
        let (mut writer, reader) =
            told.unwrap_or_else(|error| unreachable!("whole rows, or not: {error}"));
        let mut tally = |asked: &Asked| {
            if let Asked::Add(imm, peer) = *asked {
                writer.record(imm, peer);
            }
        };
        // With its counter: whoever has another tag has gone.
        let retire = |asked: &Asked| {
            if let Asked::Retire(tag) = *asked
                && table.tag(tag.slot()) != Some(tag)
            {
                reader.retire(tag);
            }
        };
        for asked in &self.asked {
            tally(asked);
            // The outcomes were seen when they came first.
            match *asked {
                Asked::Add(imm, _) => _ = table.add(imm),
                Asked::Arm(tag, writes) => _ = table.arm(tag, writes),
                Asked::Disarm(tag, writes) => _ = table.disarm(tag, writes),
                Asked::Retire(tag) => _ = table.retire(tag),
            }
            retire(asked);
        }
        tally(&what);
        let result = last(&table);
        retire(&what);
        self.asked.push(what);
        self.look(&table);
        let units = |slot, peer| reader.units(slot, peer).unwrap_or(0);
        let rows = (0..self.slots).flat_map(|slot| (0..self.peers).map(move |peer| (slot, peer)));
        self.tallies = rows.map(|(slot, peer)| units(slot, peer)).collect();
        result
    }

    fn look(&mut self, table: &Table) {
        self.stale = table.stale();
        self.seen.clear();
        for slot in 0..self.slots {
            let tag = table.tag(slot);
            let available = tag.and_then(|tag| table.available(tag).ok()).unwrap_or(0);
            let missing = tag.and_then(|tag| table.missing(tag).ok()).flatten();
            self.seen.push((tag, available, missing));
        }
    }
}
