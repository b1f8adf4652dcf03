//! What programs are made of: operations, each with a number that decides all its details.
//!
//! An operation names no object. Which engine, peer, window or counter it means is worked out from its
//! number and from what there is when it is carried out; if there is nothing for it to do it does
//! nothing. So every part of a program is a program, which is what makes shrinking simple.

/// A generator of numbers from a seed: SplitMix64, the same everywhere.
#[derive(Debug, Clone)]
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `limit`; 0 if that is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }

    /// An index into `len` things.
    pub(super) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    /// True in so many of a hundred cases.
    pub(super) fn percent(&mut self, cases: u64) -> bool {
        self.below(100) < cases
    }

    /// From 1 to `limit`, each power of two as likely as the next: mostly small.
    pub(super) fn size(&mut self, limit: u64) -> u64 {
        let bits = u64::from(limit.max(1).ilog2());
        let power = 1_u64 << self.below(bits + 1);
        (power + self.below(power)).clamp(1, limit.max(1))
    }
}

/// Kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A contiguous write.
    Single,
    /// Pages, each to its place.
    Paged,
    /// Parts of one region to several peers.
    Scatter,
    /// An immediate to each of several peers.
    Barrier,
    /// An immediate to one peer.
    Imm,
    /// A write by a descriptor of a region that was withdrawn.
    StaleWrite,
    /// A message.
    Send,
    /// Takes messages out.
    Receive,
    /// Posts receives.
    PostReceives,
    /// A callback for a count.
    Expect,
    /// A future for a count, dropped at its deadline.
    Reach,
    /// A wait that names who is missing.
    Shares,
    /// Consumes what has arrived, if it is enough.
    Take,
    /// Stops a transfer.
    Cancel,
    /// Connects.
    AddPeer,
    /// Leaves a peer.
    RemovePeer,
    /// An engine is gone without a word.
    Kill,
    /// An engine starts where one was killed.
    Revive,
    /// A NIC is lost.
    LoseNic,
    /// A NIC that was lost is back.
    ReturnNic,
    /// Two engines cannot reach each other any more.
    CutLink,
    /// They can again.
    MendLink,
    /// A NIC is taken out of use, or back into it, by its owner.
    Health,
    /// Registrations fail, or do not.
    Registration,
    /// Retires a counter; its slot's next generation takes its place.
    Retire,
    /// Withdraws a region while peers may be writing to it, and registers its memory anew.
    CloseWindow,
    /// Tries to withdraw a region that transfers read from.
    CloseSource,
    /// Lets time pass.
    Pass,
    /// Lets everything arrive that is on its way.
    Settle,
}

/// How often each kind comes, before a seed has its say.
const WEIGHTS: [(Kind, u64); 29] = [
    (Kind::Single, 160),
    (Kind::Paged, 70),
    (Kind::Scatter, 50),
    (Kind::Barrier, 30),
    (Kind::Imm, 50),
    (Kind::StaleWrite, 6),
    (Kind::Send, 50),
    (Kind::Receive, 25),
    (Kind::PostReceives, 8),
    (Kind::Expect, 30),
    (Kind::Reach, 25),
    (Kind::Shares, 30),
    (Kind::Take, 30),
    (Kind::Cancel, 40),
    (Kind::AddPeer, 60),
    (Kind::RemovePeer, 6),
    (Kind::Kill, 3),
    (Kind::Revive, 8),
    (Kind::LoseNic, 6),
    (Kind::ReturnNic, 12),
    (Kind::CutLink, 4),
    (Kind::MendLink, 8),
    (Kind::Health, 6),
    (Kind::Registration, 3),
    (Kind::Retire, 14),
    (Kind::CloseWindow, 8),
    (Kind::CloseSource, 3),
    (Kind::Pass, 60),
    (Kind::Settle, 20),
];

/// One operation of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Its kind.
    pub kind: Kind,
    /// Decides everything else about it.
    pub number: u64,
}

/// The operations of the program of `seed`.
///
/// Each seed has a mix of its own: some kinds come often, some not at all, since what happens rarely in
/// every program happens together in none.
#[must_use]
pub fn generate(seed: u64, operations: usize) -> Vec<Operation> {
    let mut numbers = Numbers::new(seed);
    let mut mix = WEIGHTS;
    for (kind, weight) in &mut mix {
        let factor = match kind {
            // Without these nothing happens at all.
            Kind::Single | Kind::AddPeer | Kind::Pass | Kind::Revive | Kind::Settle => 2,
            _ => [0, 1, 2, 2, 5][numbers.index(5)],
        };
        *weight *= factor;
    }
    let total = mix.iter().map(|(_, weight)| weight).sum();
    let pick = |numbers: &mut Numbers| {
        let mut at = numbers.below(total);
        for (kind, weight) in mix {
            match at.checked_sub(weight) {
                Some(left) => at = left,
                None => return kind,
            }
        }
        Kind::Pass
    };
    (0..operations)
        .map(|_| Operation { kind: pick(&mut numbers), number: numbers.next() })
        .collect()
}
