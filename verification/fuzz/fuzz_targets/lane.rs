//! Both halves of a lane whose words the other side may change at any time.
#![no_main]

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use immwire_core::lane::{Consumer, Entry, LaneError, Producer, Word};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Call {
    Push(u32),
    Pop,
    Room,
    /// So many pushes and pops in turns: laps go by.
    Laps(u8),
    Entry(u8, u64),
    /// An entry of nearly the right lap.
    Lap {
        entry: u8,
        value: u32,
        lap: u8,
    },
    Credit(u64),
    /// A credit that is nearly possible.
    NearCredit(i8),
}

fuzz_target!(|input: (u8, Vec<Call>)| {
    let (size, calls) = input;
    let mut lane = Lane::new(1 << (size % 5));
    for call in calls {
        lane.call(&call);
    }
});

struct Lane {
    entries: Vec<Entry>,
    credit: Word,
    producer: Producer,
    consumer: Consumer,
    /// What an honest lane would hold; `None` once somebody lied.
    honest: Option<VecDeque<u32>>,
    pushed: u32,
    /// The last credit that the producer took for possible.
    credited: u64,
}

impl Lane {
    fn new(capacity: u32) -> Self {
        Self {
            entries: (0..capacity).map(|_| [Word::new(0), Word::new(0)]).collect(),
            credit: Word::new(0),
            producer: Producer::new(capacity).expect("a power of two"),
            consumer: Consumer::new(capacity).expect("a power of two"),
            honest: Some(VecDeque::new()),
            pushed: 0,
            credited: 0,
        }
    }

    fn call(&mut self, call: &Call) {
        let at = |entry: u8| usize::from(entry) % self.entries.len();
        match *call {
            Call::Push(value) => self.push(value),
            Call::Pop => self.pop(),
            Call::Room => self.room(),
            Call::Laps(count) => (0..count).for_each(|value| {
                self.push(value.into());
                self.pop();
            }),
            Call::Entry(entry, word) => {
                self.honest = None;
                self.entries[at(entry)][0].store(word, Ordering::Relaxed);
            }
            Call::Lap { entry, value, lap } => {
                self.honest = None;
                let word = u64::from(value) << 32 | u64::from(lap);
                self.entries[at(entry)][0].store(word, Ordering::Relaxed);
            }
            Call::Credit(credit) => {
                self.honest = None;
                self.credit.store(credit, Ordering::Relaxed);
            }
            Call::NearCredit(off) => {
                self.honest = None;
                let credit = self.producer.position().wrapping_add_signed(off.into());
                self.credit.store(credit, Ordering::Relaxed);
            }
        }
    }

    fn push(&mut self, value: u32) {
        let before = (self.producer.clone(), self.words());
        let pushed = self.producer.push(&self.entries, &self.credit, value, note_of(value));
        let capacity = self.entries.len();
        if let Some(held) = &mut self.honest {
            match pushed {
                Ok(()) => held.push_back(value),
                Err(error) => assert_eq!(error, LaneError::Full),
            }
            // Full may be said early, by what was read and not published: under a quarter.
            assert!(held.len() <= capacity);
            assert!(pushed.is_ok() || held.len() + (capacity / 4).max(1) > capacity);
        }
        if pushed.is_ok() {
            self.pushed += 1;
            assert_eq!(self.producer.position(), u64::from(self.pushed));
            let (old, new) = (before.1.as_flattened(), self.words());
            let changed = old.iter().zip(new.as_flattened()).filter(|(old, new)| old != new);
            assert!(changed.count() <= 2, "a push is two stores");
        } else {
            // Only what is known of the consumer may have changed.
            assert_eq!((before.1, before.0.position()), (self.words(), self.producer.position()));
        }
    }

    fn pop(&mut self) {
        let before = self.consumer.clone();
        let popped = self.consumer.pop(&self.entries, &self.credit);
        if let Some(held) = &mut self.honest {
            let expected = held.pop_front().map(|value| (value, note_of(value)));
            assert_eq!(popped, Ok(expected));
        }
        match popped {
            Ok(Some((value, note))) => {
                assert_eq!(self.consumer.position(), before.position() + 1);
                let words = self.words();
                let there = words
                    .iter()
                    .any(|[word, beside]| (word >> 32, *beside) == (value.into(), note));
                assert!(there, "{value} was never written with {note}");
            }
            Ok(None) | Err(_) => assert_eq!(self.consumer, before),
        }
    }

    fn room(&mut self) {
        let before = self.producer.clone();
        let credit = self.credit.load(Ordering::Relaxed);
        match self.producer.room(&self.credit) {
            Ok(room) => {
                assert!(credit >= self.credited, "the consumer went backwards");
                self.credited = credit;
                let in_use = self.producer.position() - credit;
                let capacity = self.entries.len() as u64;
                assert_eq!(u64::from(room), capacity.saturating_sub(in_use));
            }
            Err(_) => assert_eq!(self.producer, before),
        }
    }

    fn words(&self) -> Vec<[u64; 2]> {
        let load = |entry: &Entry| entry.each_ref().map(|word| word.load(Ordering::Relaxed));
        self.entries.iter().map(load).collect()
    }
}

/// What an honest producer sends with a value.
fn note_of(value: u32) -> u64 {
    !u64::from(value)
}
