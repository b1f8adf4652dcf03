use std::collections::HashSet;
use std::vec::Vec;

use super::*;
use crate::group::Token;
use crate::id::{EngineId, PeerId};
use crate::mailbox::Control;
use crate::plan::PageRun;
use crate::region::{Keys, Rights};

const LAST_NUMBER: u16 = 4095;
const LONGEST: u32 = 64 << 10;
const_assert!(REGIONS == LAST_NUMBER as usize + 1 && PIECE_BYTES == LONGEST as u64);

#[test]
fn a_staged_key_gives_back_its_region_and_is_no_registration_s() {
    for number in [0, 1, 7, LAST_NUMBER] {
        for generation in [0, 1, 0x5555_5555, StagedKey::LAST_GENERATION] {
            let key = StagedKey::new(number, generation).unwrap();
            assert_eq!((key.number(), key.generation()), (number, generation));
            assert_eq!(StagedKey::of(key.bits()), Some(key));
            assert_eq!(Tenant::of(key.bits()), None);
        }
        for serial in [1, 2, LAST_SERIAL] {
            let tenant = Tenant::new(number, serial).unwrap();
            for device in [0, 1, 1 << 31, u32::MAX] {
                assert_eq!(StagedKey::of(tenant.key(device)), None);
            }
        }
    }
    // Local keys of devices, with or without a GPU's index above them.
    for key in [0, 1 << 20, u64::from(u32::MAX), 65 << 32 | 1 << 20] {
        assert_eq!(StagedKey::of(key), None);
    }
    assert_eq!(StagedKey::new(LAST_NUMBER + 1, 0), None);
    assert_eq!(StagedKey::new(0, StagedKey::LAST_GENERATION + 1), None);
}

#[test]
fn an_immediate_is_one_signal_or_none_and_never_a_control() {
    let mut signals = 0;
    // All immediates of reserved counters, and some of others'.
    for bits in (16_380_u32 << 18..16_382 << 18).chain((0..1 << 20).step_by(7)) {
        let Some(signal) = Signal::decode(bits) else { continue };
        assert_eq!(signal.encode().bits(), bits);
        assert_eq!(Control::decode(bits), Some(Err(bits)), "a plain engine refuses it");
        signals += 1;
    }
    assert_eq!(signals, usize::from(LANDING_SLOTS) * (1 + Verdict::ALL.len()));
}

#[test]
fn a_note_is_read_as_it_was_written_and_nothing_else_is_one() {
    let key = StagedKey::new(3, 9).unwrap();
    for (nic, dst, len, imm) in [
        (0, 0, 1, None),
        (7, u64::MAX, LONGEST, Some(Imm::from_bits(u32::MAX))),
        (1, 5, 6, Some(Imm::from_bits(0))),
    ] {
        let note = Note { nic, key, dst, len, imm };
        let bytes = note.to_bytes();
        assert_eq!(Note::from_bytes(&bytes), Ok(note));
        for at in 0..NOTE_BYTES {
            for bit in 0..8 {
                let mut other = bytes;
                other[at] ^= 1 << bit;
                // Another note, or none; never the same.
                if let Ok(read) = Note::from_bytes(&other) {
                    assert!(read != note && read.to_bytes() == other);
                }
            }
        }
    }
    for len in [0, LONGEST + 1] {
        let note = Note { nic: 0, key, dst: 0, len, imm: None };
        assert_eq!(Note::from_bytes(&note.to_bytes()), Err(NoNote));
    }
    assert_eq!(Note::from_bytes(&[0; NOTE_BYTES]), Err(NoNote));
}

#[test]
fn only_what_lies_in_a_region_has_a_place_there() {
    for (base, len, dst, bytes) in (0..4).flat_map(|b| {
        (0..4).flat_map(move |l| (0..8).flat_map(move |d| (0..4).map(move |n| (b, l, d, n))))
    }) {
        let inside = dst >= base && dst + u64::from(bytes) <= base + len;
        let expected = inside.then(|| dst - base);
        assert_eq!(Bounds { base, len }.offset(dst, bytes), expected);
    }
    assert_eq!(Bounds { base: 0, len: u64::MAX }.offset(u64::MAX, 1), None);
}

#[test]
fn slots_lie_behind_the_mailbox_and_nowhere_if_it_ends_there() {
    let geometry = Geometry::new(2, 128).unwrap();
    let keys = Keys::new(&[1]).unwrap();
    let rights = Rights::REMOTE_WRITE;
    let with = |len| MrDesc { owner: EngineId(1), base: 77, len, generation: 1, rights, keys };
    let whole = geometry.bytes() + TAIL_BYTES;
    let mut before = geometry.bytes();
    for slot in 0..LANDING_SLOTS {
        let offset = slot_offset(&with(whole), geometry, slot).unwrap();
        assert_eq!((offset, offset % 64), (before, 0));
        before += SLOT_BYTES;
        assert_eq!(slot_offset(&with(whole - 1), geometry, slot), None);
    }
    assert_eq!(before, whole);
    assert_eq!(slot_offset(&with(u64::MAX), geometry, LANDING_SLOTS), None);
}

#[test]
fn a_slot_is_given_out_once_until_it_comes_back() {
    let mut grants = Grants::default();
    let all: Vec<_> = core::iter::from_fn(|| grants.take()).collect();
    assert_eq!(all, (0..LANDING_SLOTS).collect::<Vec<_>>());
    for slot in all {
        assert_eq!(grants.give(slot), Ok(()));
        assert_eq!(grants.give(slot), Err(Misuse { slot }));
        assert_eq!((grants.take(), grants.take()), (Some(slot), None));
    }
    assert_eq!(grants.give(LANDING_SLOTS), Err(Misuse { slot: LANDING_SLOTS }));
}

#[test]
fn a_slot_in_doubt_is_not_given_out_until_it_comes_back() {
    for lost in [0_u32, 1, 1 << 31, 0x5555_5555, !1, u32::MAX] {
        let mut grants = Grants::default();
        for slot in 0..LANDING_SLOTS {
            assert_eq!(grants.take(), Some(slot));
            if lost & 1 << slot != 0 {
                grants.doubt(slot);
            }
        }
        assert_eq!(grants.take(), None);
        assert_eq!(grants.are_lost(), lost == u32::MAX);
        let all = |which: u32| (0..LANDING_SLOTS).filter(move |slot| which & 1 << slot != 0);
        for slot in all(!lost) {
            assert_eq!(grants.give(slot), Ok(()));
            // Of what is free there is no doubt.
            grants.doubt(slot);
        }
        let rest: Vec<_> = core::iter::from_fn(|| grants.take()).collect();
        assert_eq!(rest, all(!lost).collect::<Vec<_>>());
        for slot in all(lost) {
            assert_eq!((grants.give(slot), grants.are_lost()), (Ok(()), false));
            assert_eq!((grants.give(slot), grants.take()), (Err(Misuse { slot }), Some(slot)));
        }
    }
}

#[test]
fn whoever_needs_less_goes_past_who_needs_more() {
    let staged = StagedKey::new(1, 2).unwrap().bits();
    let peer = |index| PeerId { index, generation: 7 };
    let work = |token, to, src_key, dst_key, len| WorkRequest {
        token: Token::from_bits(token),
        nic: 0,
        remote_nic: 0,
        peer: peer(to),
        src: 0,
        src_key,
        dst: 0,
        dst_key,
        len,
        run: PageRun::NONE,
        imm: None,
    };
    let note = u64::MAX << 48;
    let kinds = [
        (Need::Nothing, (note, 1, 2, 8)),
        (Need::Room, (0, 1, 2, 8)),
        (Need::Room, (0, staged, staged, 0)),
        (Need::Slot, (0, staged, 2, 8)),
        (Need::Landing, (0, 1, staged, 8)),
        (Need::Landing, (0, staged, staged, 8)),
    ];
    for (need, (token, src_key, dst_key, len)) in kinds {
        let here = work(token, 3, src_key, dst_key, len);
        assert_eq!(Need::of(&here), need);
        for (other, (token, src_key, dst_key, len)) in kinds {
            for to in [3, 4] {
                let blocked = work(token, to, src_key, dst_key, len);
                assert_eq!(waits_behind(&here, &blocked), to == 3 && need >= other);
            }
        }
    }
}

#[test]
fn landing_slots_refuse_what_cannot_be() {
    let mut slots = Landings::default();
    for slot in 0..LANDING_SLOTS {
        assert_eq!(slots.over(slot, Verdict::Done), Err(Misuse { slot }));
        assert_eq!(slots.landed(slot), Ok(()));
        assert_eq!(slots.landed(slot), Err(Misuse { slot }));
        assert_eq!(slots.unsaid(slot, Verdict::Done), Err(Misuse { slot }));
        assert_eq!((slots.owes(), slots.give_back()), (false, None));
        assert_eq!(slots.over(slot, Verdict::Failed), Ok(()));
        assert_eq!(slots.landed(slot), Err(Misuse { slot }), "not returned yet");
        assert!(slots.owes());
        assert_eq!(slots.give_back(), Some((slot, Verdict::Failed)));
        assert_eq!(slots.unsaid(slot, Verdict::Failed), Ok(()));
        assert_eq!((slots.give_back(), slots.owes()), (Some((slot, Verdict::Failed)), false));
    }
    let slot = LANDING_SLOTS;
    assert_eq!(slots.landed(slot), Err(Misuse { slot }));
}

/// One piece to a staged region, both ends and what is between them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    piece: Option<Piece>,
    grants: Grants,
    landings: Landings,
    /// A GPU reads the source.
    reading: bool,
    /// The write is on its way, its completion, and what is said of the slot.
    write: bool,
    completion: Option<Result<(), WorkError>>,
    said: Option<Verdict>,
    /// The receiver's GPU writes the destination; and the bytes are there.
    writing: bool,
    placed: bool,
    counted: u8,
    /// The sender has given the peer up: what the transport has is flushed, or not.
    stopped: bool,
    cut: bool,
}

impl World {
    fn new() -> Self {
        let mut grants = Grants::default();
        let slot = grants.take();
        Self {
            piece: Some(Piece::copying(slot)),
            grants,
            landings: Landings::default(),
            reading: true,
            write: false,
            completion: None,
            said: None,
            writing: false,
            placed: false,
            counted: 0,
            stopped: false,
            cut: false,
        }
    }

    /// What a platform does with what the core says.
    fn take(&mut self, next: Next) {
        let Next::End(outcome) = next else { return };
        let piece = self.piece.take().expect("it ends once");
        assert!(!self.reading, "the source is still read");
        assert!(self.completion.is_none(), "the transport still has it");
        if outcome.is_ok() {
            assert!(self.placed && !self.writing && self.counted == 1, "{self:?}");
        }
        match piece.leaves() {
            // It has come back.
            _ if self.grants.clone().give(0).is_err() => {}
            Leaves::Unwritten => {
                assert!(!self.write && !self.writing && !self.placed, "{self:?}");
                assert_eq!(self.grants.give(0), Ok(()));
            }
            // The receiver has it, or will.
            Leaves::Written => assert!(outcome.is_err() && self.stopped, "{self:?}"),
            Leaves::Doubtful => {
                assert!(outcome.is_err(), "{self:?}");
                self.grants.doubt(0);
            }
        }
    }

    /// Everything that can happen next.
    fn steps(&self) -> Vec<Self> {
        let mut next = Vec::new();
        let mut step = |change: &dyn Fn(&mut Self)| {
            let mut world = self.clone();
            change(&mut world);
            if world != *self {
                next.push(world);
            }
        };
        for failed in [false, true] {
            step(&|world| {
                if std::mem::take(&mut world.reading) {
                    let outcome = if failed { Err(WorkError::Device(7)) } else { Ok(()) };
                    let next = world.piece.as_mut().expect("it reads").copied(outcome);
                    world.take(next);
                }
            });
        }
        step(&|world| {
            let Some(piece) = world.piece.as_mut().filter(|piece| piece.is_ready()) else { return };
            piece.posted();
            (world.write, world.completion) = (true, Some(Ok(())));
            if world.cut {
                (world.write, world.completion) = (false, Some(Err(WorkError::PeerGone)));
            }
        });
        step(&|world| {
            // There was no room, or a path was lost with it.
            let Some(piece) = world.piece.as_mut() else { return };
            if world.write && world.completion.is_some() {
                (world.write, world.completion) = (false, None);
                let next = piece.unposted();
                world.take(next);
            }
        });
        step(&|world| {
            // Before the receiver has looked, or long after it has given the slot back.
            if let Some(outcome) = world.completion.take() {
                let next = world.piece.as_mut().expect("it is posted").written(outcome);
                world.take(next);
            }
        });
        for refused in [false, true] {
            step(&|world| {
                if std::mem::take(&mut world.write) {
                    world.landings.landed(0).expect("vacant");
                    world.writing = !refused;
                    if refused {
                        world.landings.over(0, Verdict::Refused).expect("it landed");
                    }
                }
            });
            step(&|world| {
                if std::mem::take(&mut world.writing) {
                    let verdict = if refused { Verdict::Failed } else { Verdict::Done };
                    world.placed = !refused;
                    world.counted += u8::from(!refused);
                    world.landings.over(0, verdict).expect("it was copied");
                }
            });
        }
        step(&|world| {
            if let Some((0, verdict)) = world.landings.give_back() {
                world.said = Some(verdict);
            }
        });
        step(&|world| {
            // Lost with a path: it is said again.
            if let Some(verdict) = world.said.take() {
                world.landings.unsaid(0, verdict).expect("vacant");
            }
        });
        step(&|world| {
            if world.cut {
                return;
            }
            let Some(verdict) = world.said.take() else { return };
            assert_eq!(world.grants.give(0), Ok(()));
            let Some(piece) = world.piece.as_mut() else { return };
            let next = piece.returned(0, verdict).expect("it was written");
            world.take(next);
            // Whoever says it twice is caught.
            assert_eq!(world.grants.clone().give(0), Err(Misuse { slot: 0 }));
        });
        step(&|world| {
            // The connection ends: the transport flushes what it has, and reports nothing more.
            if std::mem::replace(&mut world.cut, true) {
                return;
            }
            if let Some(outcome) = &mut world.completion {
                *outcome = Err(WorkError::Flushed);
            }
            let Some(piece) = world.piece.as_mut() else { return };
            world.stopped = true;
            let next = piece.stop(WorkError::Flushed);
            world.take(next);
        });
        next
    }
}

#[test]
fn in_every_order_a_piece_ends_once_and_never_too_early() {
    let (mut seen, mut queue) = (HashSet::new(), Vec::from([World::new()]));
    let mut ends = 0;
    while let Some(world) = queue.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        assert!(world.counted <= 1 && (world.counted == 0 || world.placed));
        let next = world.steps();
        // Also without help of the connection's end.
        if next.iter().all(|next| next.cut && !world.cut) {
            assert_eq!(world.piece, None, "it never ends: {world:?}");
            ends += 1;
        }
        queue.extend(next);
    }
    assert!(ends > 3, "{ends} ends, of {} worlds", seen.len());
}

#[test]
fn a_piece_to_a_place_that_nics_reach_ends_with_its_write() {
    let failed = WorkError::RemoteAccess;
    for stopped in [false, true] {
        for outcome in [Ok(()), Err(failed)] {
            let mut piece = Piece::ready(None);
            assert_eq!((piece.is_ready(), piece.leaves()), (true, Leaves::Unwritten));
            piece.posted();
            assert_eq!((piece.is_ready(), piece.leaves()), (false, Leaves::Doubtful));
            if stopped {
                assert_eq!(piece.stop(WorkError::Flushed), Next::Wait);
            }
            assert_eq!(piece.written(outcome), Next::End(outcome));
        }
    }
}

#[test]
fn what_comes_back_too_early_or_twice_is_misuse() {
    let (slot, misuse) = (5, Err(Misuse { slot: 5 }));
    for mut piece in [Piece::copying(Some(slot)), Piece::ready(Some(slot))] {
        assert_eq!(piece.returned(slot, Verdict::Done), misuse);
    }
    let mut piece = Piece::ready(Some(slot));
    piece.posted();
    assert_eq!(piece.returned(slot, Verdict::Refused), Ok(Next::Wait));
    assert_eq!(piece.returned(slot, Verdict::Done), misuse);
    assert_eq!(piece.written(Err(WorkError::Flushed)), Next::End(Err(WorkError::RemoteAccess)));
    for (verdict, error) in
        [(Verdict::Refused, WorkError::RemoteAccess), (Verdict::Failed, WorkError::Device(0))]
    {
        assert_eq!(verdict.outcome(), Err(error));
    }
}
