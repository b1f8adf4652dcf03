//! How long an RDMA device's queues are, and how they grow with the sessions that share them.
//!
//! A queue comes round through all of its memory, however little of it is in use at a time. One for hundreds of peers, of which one is there,
//! has each of its entries in memory that no cache holds any more. So there are *shelves*: receive queues, of which each is
//! shared by the sessions in some seats. The first seats share a short one, as many again the next, twice as many the one after that. The
//! completion queue, of which a NIC has one, is made longer before a shelf is opened.
//!
//! Knows numbers of completions, receives, and seats; not who sits there, nor when.
//!
//! # Invariants
//!
//! 1. A completion queue has room for each receive of the shelves that are open, and each send that those who sit there may have in
//!    flight; with all of them open, no more than the device has.
//! 2. Each session finds a receive posted for each immediate that it is granted, and each note, wherever the device has so many. That
//!    some wait to be posted again together takes nothing from it.
//! 3. Seats of a number of peers are on shelves in their order. Whoever sits beyond them shares the receives of one of these.
//!
//! The tests go through devices small and large, and all numbers of peers that differ.

use crate::credit::grant;
use crate::group::NOTES_PER_PEER;

/// Seats of the first shelf.
pub const FIRST: u16 = 4;
/// No number of peers takes more.
pub const SHELVES_MAX: usize = 15;

/// What a device has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// In a completion queue.
    pub completions: u32,
    /// In a receive queue.
    pub receives: u32,
}

/// What an engine is to have under way on a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Peers at a time.
    pub peers: u16,
    /// Pieces of transfers.
    pub pieces: u16,
    /// The engine's notes that have room beside these, at most.
    pub notes: u16,
    /// Letters of each session, either way.
    pub letters: u16,
    /// Immediates of each peer.
    pub grant: u16,
    /// Receives of all peers.
    pub receives: u32,
    /// Receives that were taken, and are posted again together.
    pub together: u16,
}

/// How long a NIC's queues are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    needs: Needs,
    /// Immediates that each peer may have under way.
    pub grant: u16,
    /// For all peers, without those that wait to be posted again.
    receives: u32,
    /// The longest receive queue.
    longest: u32,
    shelves: u8,
}

/// On which shelf a seat is, if there are enough.
#[expect(clippy::cast_possible_truncation, reason = "the power is at most 13")]
const fn place(seat: u16) -> u8 {
    match (seat / FIRST).checked_ilog2() {
        None => 0,
        Some(power) => power as u8 + 1,
    }
}

impl Lengths {
    /// What fits a device: a completion for each receive that is posted, and each send that is in flight; and receives for what each peer
    /// may have under way, if there are so many. The engine's notes have a quarter at most of what completions transfers and letters leave.
    #[must_use]
    pub fn fitting(room: Room, needs: Needs) -> Self {
        let needs = Needs { peers: needs.peers.max(1), ..needs };
        let peers = u32::from(needs.peers);
        let letters = u32::from(needs.letters) * peers;
        let rest = room.completions.saturating_sub(u32::from(needs.pieces) + letters) / 4;
        let notes = NOTES_PER_PEER.saturating_mul(needs.peers).min(needs.notes);
        let notes = notes.min(u16::try_from(rest).unwrap_or(u16::MAX));
        let needs = Needs { notes, ..needs };
        let sends = u32::from(needs.pieces) + u32::from(notes) + letters;
        let wanted = (u32::from(needs.grant) + u32::from(needs.letters)) * peers;
        let receives_beside = |unposted: u32| {
            let left = room.completions.saturating_sub(sends).saturating_sub(unposted);
            wanted.min(needs.receives).min(room.receives).min(left).max(1)
        };
        let shelves = place(needs.peers - 1) + 1;
        let receives = receives_beside(u32::from(needs.together) * u32::from(shelves));
        // Where not even one immediate of each finds a receive there is nothing to share out, nor to spare.
        let is_enough = receives > letters && (receives - letters) / peers > 0;
        let (shelves, together) = if is_enough { (shelves, needs.together) } else { (1, 0) };
        let receives = if is_enough { receives } else { receives_beside(0) };
        let needs = Needs { together, ..needs };
        // Letters take receives, too. One immediate is granted to each in any case: whoever finds none posted waits.
        let own = usize::from(needs.letters) * usize::from(needs.peers);
        let entries = usize::try_from(receives).unwrap_or(usize::MAX);
        let grant = grant(entries, own, needs.peers).clamp(1, needs.grant.max(1));
        Self { needs, grant, receives, longest: room.receives.max(1), shelves }
    }

    /// How many shelves there are for all peers.
    #[must_use]
    pub const fn shelves(&self) -> u8 {
        self.shelves
    }

    /// On which shelf the session in this seat has its receives. O(1).
    #[must_use]
    pub const fn shelf_of(&self, seat: u16) -> u8 {
        // Who comes while all seats are taken, of some by those who leave, sits beyond the last, and stays there. The longest shelf has the
        // first of them: others' receives are fewer there by the least part.
        let (turn, seat) = (seat / self.needs.peers, seat % self.needs.peers);
        let shelf = place(if turn == 0 { seat } else { self.needs.peers - 1 - seat });
        if shelf < self.shelves { shelf } else { self.shelves - 1 }
    }

    /// How many peers have their seats on the first so many shelves.
    const fn seats(&self, shelves: u8) -> u16 {
        if shelves == 0 {
            return 0;
        }
        if shelves >= self.shelves {
            return self.needs.peers;
        }
        FIRST << (shelves - 1)
    }

    /// The share of the first so many shelves.
    fn share(&self, shelves: u8) -> u32 {
        let (seats, peers) = (u64::from(self.seats(shelves)), u64::from(self.needs.peers));
        u32::try_from(u64::from(self.receives) * seats / peers).unwrap_or(u32::MAX)
    }

    /// How long the receive queue of a shelf is. O(1).
    #[must_use]
    pub fn receives(&self, shelf: u8) -> u32 {
        let share = self.share(shelf + 1) - self.share(shelf);
        (share + u32::from(self.needs.together)).min(self.longest)
    }

    /// How many pieces may be in flight, notes among them, while so many shelves are open.
    #[must_use]
    pub fn pieces(&self, shelves: u8) -> u16 {
        let notes = NOTES_PER_PEER.saturating_mul(self.seats(shelves)).min(self.needs.notes);
        self.needs.pieces.saturating_add(notes)
    }

    /// How long the completion queue is, while so many shelves are open. O(shelves).
    #[must_use]
    pub fn completions(&self, shelves: u8) -> u32 {
        let receives: u32 = (0..shelves).map(|shelf| self.receives(shelf)).sum();
        let letters = u32::from(self.needs.letters) * u32::from(self.seats(shelves));
        receives + u32::from(self.pieces(shelves)) + letters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        peers: 256,
        pieces: 256,
        notes: 64 * NOTES_PER_PEER,
        letters: 8,
        grant: 256,
        receives: 32 << 10,
        together: 31,
    };

    fn numbers_of_peers() -> impl Iterator<Item = u16> {
        (1..=70).chain([
            127,
            128,
            129,
            255,
            256,
            257,
            400,
            478,
            1000,
            3000,
            4061,
            4096,
            10_000,
            u16::MAX,
        ])
    }

    /// Every device, with any number of peers.
    fn all() -> impl Iterator<Item = (Room, Needs, Lengths)> {
        let sizes = [1 << 12, 1 << 14, 32_767, 1 << 16, 1 << 22];
        let rooms = sizes.into_iter().flat_map(move |completions| {
            sizes.map(|receives| Room { completions, receives }).into_iter()
        });
        rooms.flat_map(|room| {
            numbers_of_peers().map(move |peers| {
                let needs = Needs { peers, ..NEEDS };
                (room, needs, Lengths::fitting(room, needs))
            })
        })
    }

    #[test]
    fn queues_fit_the_device_and_what_is_granted() {
        for (room, needs, lengths) in all() {
            let peers = u32::from(needs.peers);
            let shelves = lengths.shelves();
            assert!(usize::from(shelves) <= SHELVES_MAX);
            let letters = u32::from(needs.letters) * peers;
            let sends = letters + u32::from(lengths.pieces(shelves));
            // Where these leave nothing the device is too small for so many peers.
            let fits = sends < room.completions;
            assert!(!fits || lengths.completions(shelves) <= room.completions, "{lengths:?}");
            let is_enough = lengths.needs.together > 0;
            assert!(is_enough || (lengths.grant, shelves) == (1, 1), "{lengths:?}");
            let mut before = (0, 0);
            for open in 1..=shelves {
                let shelf = open - 1;
                assert!(lengths.receives(shelf) <= room.receives);
                let now = (lengths.completions(open), lengths.pieces(open));
                assert!(now.0 > before.0 && now.1 >= before.1, "{lengths:?}");
                before = now;
                // What was granted is posted, and so much more as may wait to be.
                let seats = u32::from(lengths.seats(open) - lengths.seats(shelf));
                let all = u32::from(lengths.grant + needs.letters) * seats + 31;
                let is_cut = lengths.receives(shelf) == room.receives;
                assert!(
                    all <= lengths.receives(shelf) || lengths.grant == 1 || is_cut,
                    "{lengths:?}"
                );
                let sends = u32::from(needs.letters) * u32::from(lengths.seats(open));
                let receives: u32 = (0..open).map(|shelf| lengths.receives(shelf)).sum();
                assert_eq!(now.0, receives + sends + u32::from(now.1));
            }
            // Each peer's notes have room beside all transfers, or those of many peers.
            let notes = lengths.pieces(shelves) - needs.pieces;
            let many = needs.peers.min(if room.completions < 1 << 14 { 10 } else { 64 });
            assert!(!fits || peers > 400 || notes >= NOTES_PER_PEER * many, "{lengths:?}");
        }
    }

    #[test]
    fn seats_are_on_shelves_in_their_order() {
        for (.., lengths) in all() {
            let mut last = 0;
            let peers = lengths.needs.peers;
            for seat in 0..peers {
                let shelf = lengths.shelf_of(seat);
                assert!(shelf == last || shelf == last + 1, "{lengths:?}");
                assert!(seat < lengths.seats(shelf + 1), "{lengths:?}");
                assert!(shelf == 0 || seat >= lengths.seats(shelf), "{lengths:?}");
                let mirrored = peers.checked_mul(2).map(|end| end - 1 - seat);
                assert!(mirrored.is_none_or(|it| lengths.shelf_of(it) == shelf), "{lengths:?}");
                last = shelf;
            }
            assert_eq!(last, lengths.shelves() - 1);
        }
    }

    /// Soft-RoCE's, with the default of peers, and a device with room for all.
    #[test]
    fn the_first_shelf_is_short() {
        let soft = Lengths::fitting(Room { completions: 32_767, receives: 1 << 20 }, NEEDS);
        assert_eq!((soft.grant, soft.shelves()), (106, 7));
        assert_eq!((soft.receives(0), soft.completions(1)), (487, 839));
        assert_eq!(soft.completions(7), 32_767);
        let room = Room { completions: 1 << 22, receives: 1 << 15 };
        let large = Lengths::fitting(room, Needs { peers: 64, ..NEEDS });
        assert_eq!((large.grant, large.shelves()), (256, 5));
        assert_eq!(large.receives(0), 4 * 264 + 31);
    }
}
