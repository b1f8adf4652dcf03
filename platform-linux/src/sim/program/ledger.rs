//! The count oracle and the message oracle: plain sums of what was asked for and what came of it.

use std::collections::BTreeMap;

use immwire_core::id::PeerId;
use immwire_core::imm::ImmTag;

use super::memory::Check;

/// Who sent: an engine, by the connection that it sent over.
pub(super) type Sender = (u32, PeerId);

/// Writes that were asked to count somewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// That may arrive, or have.
    pub(super) possible: u64,
    /// That are known to have arrived.
    pub(super) certain: u64,
}

/// What may have been counted under one tag at one engine.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) all: Share,
    pub(super) by: BTreeMap<Sender, Share>,
    /// Consumed by waits.
    pub(super) consumed: u64,
}

/// Accounts by engine and tag.
#[derive(Debug, Default)]
pub(super) struct Ledger(BTreeMap<(u32, u32), Account>);

impl Ledger {
    pub(super) fn account(&mut self, engine: u32, tag: ImmTag) -> &mut Account {
        self.0.entry((engine, tag.bits())).or_default()
    }

    /// Writes were submitted.
    pub(super) fn submit(&mut self, engine: u32, tag: ImmTag, sender: Sender, writes: u64) {
        let account = self.account(engine, tag);
        account.all.possible += writes;
        account.by.entry(sender).or_default().possible += writes;
    }

    /// They were not, after all: nothing of them was posted.
    pub(super) fn withdraw(&mut self, engine: u32, tag: ImmTag, sender: Sender, writes: u64) {
        let account = self.account(engine, tag);
        account.all.possible = account.all.possible.saturating_sub(writes);
        let share = account.by.entry(sender).or_default();
        share.possible = share.possible.saturating_sub(writes);
    }

    /// They have arrived.
    pub(super) fn confirm(&mut self, engine: u32, tag: ImmTag, sender: Sender, writes: u64) {
        let account = self.account(engine, tag);
        account.all.certain += writes;
        account.by.entry(sender).or_default().certain += writes;
    }

    /// The tag's counter was retired. What was sent to it counts for nobody, until the tag comes again.
    pub(super) fn retire(&mut self, engine: u32, tag: ImmTag) {
        let account = self.account(engine, tag);
        account.all.certain = 0;
        account.consumed = 0;
        account.by.values_mut().for_each(|share| share.certain = 0);
    }
}

impl Account {
    /// What the counter has seen lies between what must have come and what may have.
    pub(super) fn check(&self, available: u64, settled: bool) -> Check {
        let seen = self.consumed.saturating_add(available);
        let Share { possible, certain } = self.all;
        if seen > possible {
            return Err(format!("{seen} writes were counted, {possible} were sent"));
        }
        if settled && seen < certain {
            return Err(format!("{seen} writes were counted, {certain} have arrived"));
        }
        Ok(())
    }

    /// Whether everything that was ever sent has been counted, and so its bytes must be there.
    pub(super) fn is_complete(&self, available: u64) -> bool {
        self.consumed.saturating_add(available) == self.all.possible
    }
}

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    UnderWay,
    Done,
    NeverStarted,
    Unknown,
}

/// The messages of one sender over one connection, in order.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) sent: Vec<Sent>,
    /// The first that has not come.
    next: usize,
}

impl Stream {
    /// A message came.
    pub(super) fn deliver(&mut self, number: usize) -> Check {
        let skipped = self.sent.get(self.next..number);
        let skipped = skipped.ok_or_else(|| {
            format!("message {number} came when {} was the next: twice, or out of order", self.next)
        })?;
        if let Some(lost) = skipped.iter().position(|sent| *sent != Sent::NeverStarted) {
            return Err(format!("message {number} came before {}", self.next + lost));
        }
        match self.sent.get(number) {
            None => return Err(format!("message {number} was never sent")),
            Some(Sent::NeverStarted) => {
                return Err(format!("message {number} came, and ended as never started"));
            }
            Some(_) => {}
        }
        self.next = number + 1;
        Ok(())
    }

    /// A message that has come cannot end as never started.
    pub(super) fn end(&mut self, number: usize, sent: Sent) -> Check {
        if sent == Sent::NeverStarted && number < self.next {
            return Err(format!("message {number} came, and ended as never started"));
        }
        if let Some(place) = self.sent.get_mut(number) {
            *place = sent;
        }
        Ok(())
    }

    /// The message that must come next: it is done, and there is none before it.
    pub(super) fn missing(&self) -> Option<usize> {
        let mut left = self.sent.iter().enumerate().skip(self.next);
        let (at, next) = left.find(|(_, sent)| **sent != Sent::NeverStarted)?;
        (*next == Sent::Done).then_some(at)
    }
}
