//! Room at a receiver's completion queue, counted by both sides.
//!
//! Some devices (EFA's unsolicited writes) deliver an immediate without asking whether there is room for
//! it: a queue that overruns is lost, and everything with it. A completion at the sender says nothing of
//! that room either, since it comes when the bytes have landed, not when somebody has read the event. So
//! the receiver grants each peer a number of immediates on each of its NICs, and tells how many it has
//! taken. Both counts only grow; a report that is overtaken does no harm. One that is lost is not sent again: who
//! carries them repeats them, or ends the session.
//!
//! # Invariants
//!
//! 1. Sent, but not yet reported as taken, are at most as many as were granted; and what settles broken paths, where the transport
//!    waits for a receive.
//! 2. A report is due before the sender can run out: at half the grant.
//! 3. A report from outside that claims more than was sent is refused.
//! 4. Whoever cannot send for want of room still asks, by heartbeats, whether the peer is there.
//!
//! The tests below run all interleavings of a small sender and receiver.

use crate::imm::Imm;
use crate::mailbox::Control;

/// There is no room for an immediate until the peer has taken more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shut;

/// What a sender may still send over one NIC of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Allowance {
    granted: u16,
    sent: u64,
    taken: u64,
}

/// The peer says that it has taken more than it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Overstated {
    /// Immediates sent so far.
    pub sent: u64,
    /// Immediates that are said to be taken.
    pub claimed: u64,
}

impl Allowance {
    /// Room for `granted` immediates.
    #[must_use]
    pub const fn new(granted: u16) -> Self {
        Self { granted, sent: 0, taken: 0 }
    }

    /// Whether one more may be sent.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.sent - self.taken < self.granted as u64
    }

    /// What of a piece's immediate is sent with it now.
    ///
    /// Heartbeats never wait for room: where there is none, the bare write goes, of nothing. The peer has yet to take all that
    /// it granted, and hears of us by that; but if it is gone, and nothing is in flight to it, nothing else would say so.
    ///
    /// # Errors
    ///
    /// [`Shut`]: the piece waits.
    #[inline]
    pub fn carries(&self, imm: Option<Imm>) -> Result<Option<Imm>, Shut> {
        match imm {
            Some(imm) if !self.is_open() => beyond(imm),
            _ => Ok(imm),
        }
    }

    /// Whether a piece with this immediate goes now, over a transport that itself waits for a receive: without one it asks again.
    ///
    /// What settles a broken path waits for no room: to be taken may be just what the peer, or we, have yet to be told of.
    #[inline]
    #[must_use]
    pub fn admits(&self, imm: Option<Imm>) -> bool {
        imm.is_none_or(|imm| self.is_open() || settles(imm))
    }

    /// One was sent. To be called only while [`Allowance::is_open`], or of one that is admitted.
    pub const fn spend(&mut self) {
        self.sent += 1;
    }

    /// So many of those that were sent did not arrive, and never will: the peer will not take them.
    pub const fn restore(&mut self, lost: u64) {
        let sent = self.sent.saturating_sub(lost);
        self.sent = if sent < self.taken { self.taken } else { sent };
    }

    /// Sent since the start.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// The peer has taken `claimed` since the start. Older reports change nothing.
    ///
    /// # Errors
    ///
    /// [`Overstated`].
    pub const fn report(&mut self, claimed: u64) -> Result<(), Overstated> {
        if claimed > self.sent {
            return Err(Overstated { sent: self.sent, claimed });
        }
        if claimed > self.taken {
            self.taken = claimed;
        }
        Ok(())
    }
}

#[cold]
fn beyond(imm: Imm) -> Result<Option<Imm>, Shut> {
    match Control::decode(imm.bits()) {
        Some(Ok(Control::Heartbeat(_))) => Ok(None),
        _ => Err(Shut),
    }
}

/// Whether it asks what arrived over a path, or answers that.
#[cold]
fn settles(imm: Imm) -> bool {
    matches!(Control::decode(imm.bits()), Some(Ok(Control::Ask { .. } | Control::Answer(_))))
}

/// What a receiver has taken of one peer's over one of its own NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Takings {
    granted: u16,
    taken: u64,
    reported: u64,
}

impl Takings {
    /// For a peer that was granted so many.
    #[must_use]
    pub const fn new(granted: u16) -> Self {
        Self { granted, taken: 0, reported: 0 }
    }

    /// An immediate was taken. Returns whether a report is due.
    pub const fn take(&mut self) -> bool {
        self.taken += 1;
        self.is_due()
    }

    /// Taken since the start.
    #[must_use]
    pub const fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether the sender is to be told.
    #[must_use]
    pub const fn is_due(&self) -> bool {
        (self.taken - self.reported) * 2 >= self.granted as u64 && self.taken > self.reported
    }

    /// What the report says; it counts as made.
    pub const fn report(&mut self) -> u64 {
        self.reported = self.taken;
        self.taken
    }
}

/// Whether all that a peer has sent since the start, by NIC of the receiver, is taken. What is not named there is not waited for.
#[must_use]
pub fn all_taken(sent: &[u64], takings: &[Takings]) -> bool {
    sent.iter().zip(takings).all(|(sent, takings)| takings.taken() >= *sent)
}

/// The grant for each of `peers` on a NIC, of a queue of `entries`, of which `own` are for our own
/// completions. Zero if there is no room for all of them.
#[must_use]
pub fn grant(entries: usize, own: usize, peers: u16) -> u16 {
    let room = entries.saturating_sub(own) / usize::from(peers.max(1));
    u16::try_from(room).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::vec::Vec;

    use super::*;
    use crate::imm::ImmTag;
    use crate::receipt::Epoch;

    /// On two NICs, whatever was sent and taken of each; of a third nothing is known.
    #[test]
    fn all_is_taken_when_nothing_of_any_nic_is_missing() {
        for (sent, taken) in (0..256_u64).map(|n| ([n % 4, n / 4 % 4], [n / 16 % 4, n / 64])) {
            let mut takings = [Takings::new(4); 3];
            for (takings, count) in takings.iter_mut().zip(taken) {
                (0..count).for_each(|_| _ = takings.take());
            }
            let missing = sent.iter().zip(taken).any(|(sent, taken)| *sent > taken);
            assert_eq!(all_taken(&sent, &takings), !missing, "{sent:?} {taken:?}");
        }
    }

    /// All orders of sending, losing, taking, reporting, and of reports that overtake each other:
    /// never more is under way than was granted, and nobody is ever stuck.
    #[test]
    fn a_queue_never_overruns_and_nobody_is_stuck() {
        for granted in 1..5_u16 {
            let mut seen = BTreeSet::new();
            let start = (Allowance::new(granted), Takings::new(granted), [None, None], 0_u64);
            let mut open = Vec::from([start]);
            while let Some((allowance, takings, told, waiting)) = open.pop() {
                let key = (allowance.sent, allowance.taken, takings.taken, takings.reported, told);
                if !seen.insert(key) || allowance.sent > 12 {
                    continue;
                }
                // Sent and not read by the receiver: that is what lies in its queue.
                assert!(waiting <= u64::from(granted));
                assert_eq!(waiting, allowance.sent - takings.taken);
                let mut next = Vec::new();
                if allowance.is_open() {
                    let mut sender = allowance;
                    sender.spend();
                    next.push((sender, takings, told, waiting + 1));
                }
                if waiting > 0 {
                    let mut receiver = takings;
                    receiver.take();
                    next.push((allowance, receiver, told, waiting - 1));
                    // Or it is lost on its way, and the sender is told.
                    let mut sender = allowance;
                    sender.restore(1);
                    next.push((sender, takings, told, waiting - 1));
                }
                if takings.is_due()
                    && let Some(free) = told.iter().position(Option::is_none)
                {
                    let (mut receiver, mut told) = (takings, told);
                    told[free] = Some(receiver.report());
                    next.push((allowance, receiver, told, waiting));
                }
                for at in 0..2 {
                    if let Some(claimed) = told[at] {
                        let (mut sender, mut told) = (allowance, told);
                        told[at] = None;
                        sender.report(claimed).unwrap();
                        next.push((sender, takings, told, waiting));
                    }
                }
                assert!(!next.is_empty(), "stuck: {allowance:?} {takings:?} {told:?}");
                open.extend(next);
            }
            assert!(seen.len() > 20 * usize::from(granted), "{}", seen.len());
        }
    }

    #[test]
    fn a_report_is_not_believed_beyond_what_was_sent() {
        let mut allowance = Allowance::new(2);
        allowance.spend();
        assert_eq!(allowance.report(2), Err(Overstated { sent: 1, claimed: 2 }));
        assert_eq!(allowance.report(u64::MAX), Err(Overstated { sent: 1, claimed: u64::MAX }));
        allowance.spend();
        assert!(!allowance.is_open());
        allowance.report(1).unwrap();
        allowance.report(0).unwrap();
        assert!(allowance.is_open());
    }

    /// One of each kind that there is.
    fn imms() -> impl Iterator<Item = Imm> {
        let controls = [
            Control::Message(3),
            Control::Credit(63),
            Control::Heartbeat(crate::mailbox::Usage::None),
            Control::Heartbeat(crate::mailbox::Usage::Some),
            Control::Heartbeat(crate::mailbox::Usage::Over(1)),
            Control::Heartbeat(crate::mailbox::Usage::Stays(255)),
            Control::Ask { from: 1, to: 2, epoch: Epoch::default() },
            Control::Answer(7),
        ];
        let tag = ImmTag::new(0, 0).unwrap();
        let users = [1, 2, 0xfff].map(|units| tag.with_units(units).unwrap());
        controls.map(|control| Imm::from_bits(control.encode())).into_iter().chain(users)
    }

    /// Whatever an immediate says, and whether there is room or not.
    #[test]
    fn heartbeats_alone_go_without_room() {
        let (open, shut) = (Allowance::new(1), Allowance::new(0));
        for imm in imms() {
            assert_eq!(open.carries(Some(imm)), Ok(Some(imm)));
            let beats = matches!(Control::decode(imm.bits()), Some(Ok(Control::Heartbeat(_))));
            assert_eq!(shut.carries(Some(imm)), if beats { Ok(None) } else { Err(Shut) });
        }
        assert_eq!((open.carries(None), shut.carries(None)), (Ok(None), Ok(None)));
    }

    /// The same where the transport waits. Room that is taken so comes back as any other does.
    #[test]
    fn what_settles_a_path_alone_does_not_wait() {
        for granted in 0..3 {
            let mut allowance = Allowance::new(granted);
            for sent in 0..5 {
                let is_open = sent < u64::from(granted);
                assert!(allowance.admits(None));
                let admitted: Vec<_> = imms().filter(|imm| allowance.admits(Some(*imm))).collect();
                let settling = imms().filter(|imm| {
                    let said = Control::decode(imm.bits());
                    matches!(said, Some(Ok(Control::Ask { .. } | Control::Answer(_))))
                });
                let expected: Vec<_> = if is_open { imms().collect() } else { settling.collect() };
                assert_eq!(admitted, expected, "{granted} {sent}");
                assert!(expected.len() >= 2);
                allowance.spend();
            }
            allowance.report(5).unwrap();
            assert_eq!(allowance.is_open(), granted > 0);
        }
    }

    #[test]
    fn grants_fit_the_queue() {
        for entries in 0..40 {
            for own in 0..10 {
                for peers in 1..6_u16 {
                    let each = usize::from(grant(entries, own, peers));
                    let all = each * usize::from(peers);
                    assert!(all + own.min(entries) <= entries.max(own));
                    // None is left that would have made a whole round.
                    assert!(all + usize::from(peers) > entries.saturating_sub(own));
                }
            }
        }
        assert_eq!(grant(usize::MAX, 0, 1), u16::MAX);
        assert_eq!(grant(10, 0, 0), 10);
    }
}
