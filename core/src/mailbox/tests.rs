use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

fn geometry(slots: u8) -> Geometry {
    Geometry::new(slots, 128).unwrap()
}

fn header(len: u32, sequence: u64) -> [u8; HEADER_BYTES] {
    MessageHeader { len, kind: 3, sequence }.to_bytes()
}

#[test]
fn control_immediates_are_those_and_no_others() {
    let mut known: BTreeMap<u32, Control> = BTreeMap::new();
    for slot in 0..MAX_SLOTS {
        known.insert((16383 << 18) | u32::from(slot), Control::Message(slot));
        known.insert((16382 << 18) | u32::from(slot), Control::Credit(slot));
    }
    for (units, usage) in [(1, Usage::None), (2, Usage::Some)] {
        known.insert((16381 << 18) | units, Control::Heartbeat(usage));
    }
    for round in 0..=255 {
        let [over, stays] = [Usage::Over(round), Usage::Stays(round)].map(Control::Heartbeat);
        known.insert((16381 << 18) | 0x100 | u32::from(round), over);
        known.insert((16381 << 18) | 0x200 | u32::from(round), stays);
    }
    for of in 0..8 {
        known.insert((16381 << 18) | 1 << 10 | u32::from(of), Control::Answer(of));
    }
    for (number, nics) in (0..2048).flat_map(|number| (0..64).map(move |nics| (number, nics))) {
        let (from, to, epoch) = (nics / 8, nics % 8, Epoch::new(number).unwrap());
        let (low, high) = (u32::from(number % 64), u32::from(number / 64));
        let units = 1 << 11 | high << 6 | u32::from(nics);
        known.insert((16381 << 18) | low << 12 | units, Control::Ask { from, to, epoch });
    }
    for (bits, control) in &known {
        assert_eq!(control.encode(), *bits);
    }
    // All immediates of the reserved counters, and the neighbourhood of the last of the users'.
    let reserved = u32::from(USER_COUNTERS) << 18;
    for bits in reserved - 5000..=u32::MAX {
        let expected = (bits >= reserved).then(|| known.get(&bits).copied().ok_or(bits));
        assert_eq!(Control::decode(bits), expected, "{bits:#x}");
    }
    for counter in 0..USER_COUNTERS {
        assert_eq!(Control::decode(u32::from(counter) << 18), None);
        assert_eq!(Control::decode((u32::from(counter) << 18) | 0x3ffff), None);
    }
}

#[test]
fn what_keeps_a_connection_is_no_use_of_it() {
    let (from, to, epoch) = (0, 1, Epoch::ZERO);
    for (control, is_use) in [
        (Control::Message(0), true),
        (Control::Credit(63), true),
        (Control::Heartbeat(Usage::Some), true),
        (Control::Heartbeat(Usage::None), false),
        (Control::Heartbeat(Usage::Over(1)), false),
        (Control::Heartbeat(Usage::Stays(1)), true),
        (Control::Ask { from, to, epoch }, true),
        (Control::Answer(7), false),
    ] {
        assert_eq!(control.is_use(), is_use, "{control:?}");
    }
}

#[test]
fn geometry_is_one_to_64_slots_of_whole_lines() {
    for slots in 0..=u8::MAX {
        let large = [1 << 22, (1 << 22) + 64, 1 << 28, (1 << 28) + 64, u32::MAX, u32::MAX - 63];
        for slot_bytes in (0..=256).chain(large) {
            let bytes = u64::from(slots) * u64::from(slot_bytes);
            let possible = (1..=64).contains(&slots)
                && slot_bytes % 64 == 0
                && (1..=256 << 20).contains(&bytes);
            let got = Geometry::new(slots, slot_bytes);
            assert_eq!(got.is_ok(), possible, "{slots} {slot_bytes}");
            let Ok(geometry) = got else { continue };
            let messages = bytes;
            assert_eq!(geometry.bytes(), messages + 512);
            for nic in 0..=u8::MAX {
                let offset = messages + 64 * u64::from(nic);
                assert_eq!(geometry.receipt_offset(nic), (nic < 8).then_some(offset));
            }
            assert_eq!(geometry.max_message_bytes(), slot_bytes - 16);
            for slot in 0..=u8::MAX {
                let offset = u64::from(slot) * u64::from(slot_bytes);
                assert_eq!(geometry.offset(slot), (slot < slots).then_some(offset));
            }
        }
    }
}

#[test]
fn a_header_is_laid_out_as_agreed() {
    let message = MessageHeader { len: 0x0403_0201, kind: 9, sequence: 0x0f0e_0d0c_0b0a_0908 };
    let bytes = *b"Im\x01\x09\x01\x02\x03\x04\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f";
    assert_eq!(message.to_bytes(), bytes);
    assert_eq!(MessageHeader::from_bytes(&bytes), Ok(message));
    for len in 0..16 {
        let short = MessageHeader::from_bytes(&bytes[..len]);
        assert_eq!(short, Err(HeaderError::Length { found: len }));
    }
    let wrong = |at: usize| {
        let mut bytes = bytes;
        bytes[at] = 0;
        MessageHeader::from_bytes(&bytes).unwrap_err()
    };
    assert_eq!(wrong(0), HeaderError::Magic { found: 0x6d00 });
    assert_eq!(wrong(2), HeaderError::Version { found: 0 });
}

/// A sender, a receiver, and everything on its way between them.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Pair {
    outbox: Outbox,
    inbox: Inbox,
    /// What lies in the receiver's memory: for each slot the message last written to it.
    memory: Vec<Option<u64>>,
    /// Slots whose immediate has not arrived yet.
    messages: BTreeSet<SlotIndex>,
    credits: BTreeSet<SlotIndex>,
    /// Slots delivered and not consumed, with the message seen there.
    reading: BTreeMap<SlotIndex, u64>,
    sent: u64,
    delivered: u64,
}

impl Pair {
    fn new(slots: u8) -> Self {
        Self {
            outbox: Outbox::new(geometry(slots)),
            inbox: Inbox::new(geometry(slots)),
            memory: std::vec![None; slots.into()],
            messages: BTreeSet::new(),
            credits: BTreeSet::new(),
            reading: BTreeMap::new(),
            sent: 0,
            delivered: 0,
        }
    }

    fn check(&self) {
        let slots = self.memory.len();
        // A slot is in one place: free, on its way there, waiting or being read, on its way back.
        let away = usize::try_from(self.outbox.free()).unwrap();
        let waiting = (self.inbox.held & !self.inbox.lent).count_ones() as usize;
        let known = self.messages.len() + waiting + self.reading.len() + self.credits.len();
        assert_eq!(away + known, slots);
        // What is being read has not been overwritten.
        for (slot, message) in &self.reading {
            assert_eq!(self.memory[usize::from(*slot)], Some(*message));
        }
    }

    /// Every state that one event leads to.
    fn next(&self, messages: u64) -> Vec<Self> {
        let mut all = Vec::new();
        if self.sent < messages {
            let mut pair = self.clone();
            if pair.send() {
                all.push(pair);
            }
        }
        for slot in &self.messages {
            let mut pair = self.clone();
            pair.messages.remove(slot);
            let message = pair.memory[usize::from(*slot)].unwrap();
            pair.inbox.handle_message(*slot, &header(5, message)).unwrap();
            all.push(pair);
        }
        let mut pair = self.clone();
        if let Some(delivery) = pair.inbox.poll_delivery() {
            pair.deliver(delivery);
            all.push(pair);
        }
        for slot in self.reading.keys() {
            let mut pair = self.clone();
            pair.reading.remove(slot);
            assert_eq!(pair.inbox.handle_consumed(*slot), Ok(Control::Credit(*slot)));
            assert!(pair.credits.insert(*slot));
            all.push(pair);
        }
        for slot in &self.credits {
            let mut pair = self.clone();
            pair.credits.remove(slot);
            assert_eq!(pair.outbox.release(*slot), Ok(()));
            all.push(pair);
        }
        all
    }

    /// Reserves and writes at once, in whatever order the immediates arrive later.
    fn send(&mut self) -> bool {
        let before = self.outbox.clone();
        let free = before.free();
        match self.outbox.reserve(5) {
            Ok(reserved) => {
                assert!(free > 0);
                assert_eq!(reserved.sequence, self.sent);
                assert_eq!(reserved.offset, u64::from(reserved.slot) * 128);
                // Taken back at once, it was never taken.
                let mut back = self.outbox.clone();
                assert_eq!(back.withdraw(reserved), Ok(()));
                assert_eq!(back, before);
                self.memory[usize::from(reserved.slot)] = Some(self.sent);
                assert!(self.messages.insert(reserved.slot));
                self.sent += 1;
                true
            }
            Err(error) => {
                assert_eq!((error, free), (SendError::Full, 0));
                assert_eq!(self.outbox, before);
                false
            }
        }
    }

    fn deliver(&mut self, delivery: Delivery) {
        let Delivery { slot, offset, len, kind, sequence } = delivery;
        assert_eq!((sequence, len, kind), (self.delivered, 5, 3));
        assert_eq!(offset, u64::from(slot) * 128 + 16);
        assert_eq!(self.memory[usize::from(slot)], Some(sequence));
        assert!(self.reading.insert(slot, sequence).is_none());
        self.delivered += 1;
    }
}

/// Calls `each` with every state that a pair with so many slots and messages can be in.
fn explore(slots: u8, messages: u64, mut each: impl FnMut(&Pair)) -> usize {
    let mut seen = HashSet::from([Pair::new(slots)]);
    let mut open: Vec<Pair> = seen.iter().cloned().collect();
    while let Some(pair) = open.pop() {
        pair.check();
        each(&pair);
        let next = pair.next(messages);
        if next.is_empty() {
            // Nothing moves any more: everything was delivered, every slot came back.
            assert_eq!((pair.sent, pair.delivered), (messages, messages));
            assert_eq!(pair.outbox.free(), u32::from(slots));
        }
        for pair in next {
            if seen.insert(pair.clone()) {
                open.push(pair);
            }
        }
    }
    seen.len()
}

#[test]
fn every_interleaving_delivers_all_in_order() {
    for (slots, messages, states) in [(1, 4, 10), (2, 5, 100), (3, 4, 500)] {
        assert!(explore(slots, messages, |_| {}) > states, "{slots} slots");
    }
}

/// In every state, everything that a peer can say is judged right, and what is refused changes nothing.
#[test]
fn hostile_words_change_nothing() {
    let (mut accepted, mut refused) = (0, 0);
    explore(2, 3, |pair| {
        // What the inbox has, by the model's own account.
        let waiting: BTreeSet<u64> = (0..2)
            .filter(|slot| pair.inbox.held & !pair.inbox.lent & (1 << slot) != 0)
            .filter_map(|slot| pair.memory[slot])
            .collect();
        for slot in (0..4).chain([63, 64, u8::MAX]) {
            for sequence in (0..8).chain([63, 64, 65, 66, u64::MAX]) {
                for len in [0, 112, 113, u32::MAX] {
                    let mut inbox = pair.inbox.clone();
                    let got = inbox.handle_message(slot, &header(len, sequence));
                    let free = slot < 2 && pair.inbox.held & (1 << slot) == 0;
                    let ahead = (pair.delivered..pair.delivered + 2).contains(&sequence);
                    let good = free && len <= 112 && ahead && !waiting.contains(&sequence);
                    assert_eq!(got.is_ok(), good, "{slot} {sequence} {len} {got:?}");
                    assert_eq!(inbox != pair.inbox, good);
                    *(if good { &mut accepted } else { &mut refused }) += 1;
                }
            }
            let mut inbox = pair.inbox.clone();
            assert!(inbox.handle_message(slot, &[0; HEADER_BYTES]).is_err());
            assert_eq!(inbox, pair.inbox);
        }
        for slot in 0..=u8::MAX {
            let mut outbox = pair.outbox.clone();
            let taken = slot < 2 && pair.outbox.taken & (1 << slot) != 0;
            assert_eq!(outbox.release(slot).is_ok(), taken);
            assert_eq!(outbox != pair.outbox, taken);
            let mut inbox = pair.inbox.clone();
            let lent = pair.reading.contains_key(&slot);
            assert_eq!(inbox.handle_consumed(slot).is_ok(), lent);
            assert_eq!(inbox != pair.inbox, lent);
        }
    });
    assert!(accepted > 100 && refused > 10_000);
}

#[test]
fn errors_say_what_was_found() {
    let mut inbox = Inbox::new(geometry(2));
    let mut say = |slot, header: &[u8]| inbox.handle_message(slot, header).unwrap_err();
    assert_eq!(say(2, &header(1, 0)), InboxError::NoSuchSlot { slot: 2, slots: 2 });
    assert_eq!(say(0, &header(113, 0)), InboxError::TooLong { len: 113, max: 112 });
    assert_eq!(say(0, &header(1, 2)), InboxError::Sequence { found: 2, next: 0 });
    assert_eq!(say(0, b"short"), InboxError::Header(HeaderError::Length { found: 5 }));
    inbox.handle_message(0, &header(1, 1)).unwrap();
    let mut say = |slot, header: &[u8]| inbox.handle_message(slot, header).unwrap_err();
    assert_eq!(say(0, &header(1, 0)), InboxError::SlotInUse { slot: 0 });
    assert_eq!(say(1, &header(1, 1)), InboxError::Sequence { found: 1, next: 0 });
    assert_eq!(inbox.handle_consumed(0), Err(InboxError::NotLent { slot: 0 }));

    let mut outbox = Outbox::new(geometry(2));
    assert_eq!(outbox.reserve(113), Err(SendError::TooLarge { len: 113, max: 112 }));
    let first = outbox.reserve(112).unwrap();
    let second = outbox.reserve(0).unwrap();
    assert_eq!(outbox.reserve(0), Err(SendError::Full));
    assert_eq!(outbox.withdraw(first), Err(CreditError::NotLast { slot: 0 }));
    assert_eq!(outbox.release(2), Err(CreditError::NoSuchSlot { slot: 2, slots: 2 }));
    outbox.release(second.slot).unwrap();
    assert_eq!(outbox.withdraw(second), Err(CreditError::NotTaken { slot: 1 }));
    outbox.close();
    assert_eq!(outbox.reserve(0), Err(SendError::Closed));
}

proptest! {
    /// The largest mailbox, filled again and again in random order.
    #[test]
    fn the_largest_mailbox_keeps_order(rounds in prop::collection::vec(any::<u64>(), 1..5)) {
        let mut pair = Pair::new(MAX_SLOTS);
        for round in &rounds {
            while pair.send() {}
            let mut order: Vec<SlotIndex> = core::mem::take(&mut pair.messages).into_iter().collect();
            // A shuffle that depends on the round's number.
            order.sort_by_key(|slot| (u64::from(*slot) + 1).wrapping_mul(round | 1).rotate_left(17));
            for slot in order {
                let message = pair.memory[usize::from(slot)].unwrap();
                prop_assert_eq!(pair.inbox.handle_message(slot, &header(5, message)), Ok(()));
                while let Some(delivery) = pair.inbox.poll_delivery() {
                    pair.deliver(delivery);
                }
            }
            for (slot, _) in core::mem::take(&mut pair.reading) {
                prop_assert_eq!(pair.inbox.handle_consumed(slot), Ok(Control::Credit(slot)));
                prop_assert_eq!(pair.outbox.release(slot), Ok(()));
            }
        }
        prop_assert_eq!(pair.delivered, 64 * rounds.len() as u64);
    }

    #[test]
    fn any_header_is_harmless(
        bytes in prop::collection::vec(any::<u8>(), 0..20),
        tail in any::<[u8; 13]>(),
        slot in any::<u8>(),
    ) {
        let mut inbox = Inbox::new(geometry(MAX_SLOTS));
        prop_assert!(inbox.handle_message(slot, &bytes).is_err());
        let plausible = [&b"Im\x01"[..], &tail].concat();
        let message = MessageHeader::from_bytes(&plausible).unwrap();
        prop_assert_eq!(&message.to_bytes()[..], &plausible[..]);
        let good = slot < 64 && message.len <= 112 && message.sequence < 64;
        prop_assert_eq!(inbox.handle_message(slot, &plausible).is_ok(), good);
    }
}

/// Any number of peers that take nothing and want everything, in turn or one after the other: while they are fewer than there is room for,
/// one that takes what comes has its turn at once.
#[test]
fn who_takes_no_credits_keeps_none_from_others() {
    for (peers, queue_depth) in
        [(1, 2), (1, 256), (3, 4), (8, 256), (33, 64), (96, 256), (256, 256), (992, 4096_u16)]
    {
        let room = credit_room(peers, queue_depth);
        assert!(room >= 1 && room <= queue_depth / 2 && room <= peers + 32, "{room}");
        for stuck in 0..=usize::from(peers).min(200) {
            for in_turn in [true, false] {
                let mut under_way = std::vec![0_u16; stuck];
                let mut all = 0;
                for _ in 0..40 {
                    for to_peer in &mut under_way {
                        while credit_may_go(all, *to_peer, room) {
                            (all, *to_peer) = (all + 1, *to_peer + 1);
                            if in_turn {
                                break;
                            }
                        }
                    }
                }
                let shared = room.min(64) / 2;
                assert!(all <= room && (stuck == 0 || all >= shared));
                let others = usize::from(room - shared);
                assert!(stuck >= others || credit_may_go(all, 0, room), "{room} {stuck}");
                // Where queues are long enough, that is all of them but one.
                if usize::from(room) >= usize::from(peers) + 32 {
                    assert!(
                        stuck >= usize::from(peers) || credit_may_go(all, 0, room),
                        "{room} {stuck}"
                    );
                }
            }
        }
    }
}
