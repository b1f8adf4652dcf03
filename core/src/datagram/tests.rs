use std::vec::Vec;

use super::*;
use crate::mailbox::Geometry;
use crate::region::{Keys, MrDesc, Rights};
use crate::wire::{NetAddr, NicAddr, ProviderKind};

fn address(len: usize, byte: u8) -> Address {
    Address::from_slice(&std::vec![byte; len]).unwrap()
}

fn claim(nics: u8, len: usize) -> Claim {
    let geometry = Geometry::new(2, 64).unwrap();
    let keys: Vec<u64> = (0..u64::from(nics)).collect();
    let mailbox = MrDesc {
        owner: EngineId(7),
        base: 4096,
        len: geometry.bytes(),
        generation: 1,
        rights: Rights::REMOTE_WRITE,
        keys: Keys::new(&keys).unwrap(),
    };
    let nic = NicAddr { speed_gbps: 100, address: address(len, 9) };
    let nics = std::vec![nic; usize::from(nics)];
    let hello = Hello {
        address: NetAddr::new(ProviderKind::Libfabric, EngineId(7), &nics).unwrap(),
        mailbox,
        geometry,
        heartbeat_ms: 500,
        call: 6,
    };
    Claim {
        token: 0x0123_4567_89ab_cdef,
        grant: 77,
        protocol: Protocol { number: 5, version: 6, data_bytes: 8 },
        turn: Turn(3),
        ports: nics.iter().map(|_| address(len, 5)).collect(),
        gone: 4,
        hello,
    }
}

fn encoded(claim: &Claim) -> Vec<u8> {
    let mut bytes = std::vec![0; DATAGRAM_MAX];
    let len = claim.encode(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// One of each kind, and the longest of those that vary.
fn messages(claim: &[u8]) -> Vec<Message<'_>> {
    let (nonce, proof, door) = ([1; 32], [2; 32], address(16, 3));
    let nonces = Nonces { initiator: nonce, acceptor: [4; 32] };
    let tenant = Tenant::new(9, 8).unwrap();
    let ports: Addresses = (0..8).map(|n| address(NIC_ADDRESS_MAX, n)).collect();
    let mut all = Vec::from([
        Message::Call { nonce, target: EngineId(5), door: door.clone() },
        Message::Challenge(nonces),
        Message::Prove { nonces, door, proof, claim },
        Message::Accept { nonce, proof, claim },
        Message::Refuse { nonce, why: Refusal::Crossed },
    ]);
    for say in [
        Say::Ready { gone: 3 },
        Say::Gone { part: 7, tenants: Tenants::new() },
        Say::Gone { part: 0, tenants: (0..PART).map(|_| tenant).collect() },
        Say::Bye { quiet: true, sent: Counts::from_slice(&[u64::MAX; MAX_NICS]).unwrap() },
        Say::Bye { quiet: false, sent: Counts::new() },
        Say::Taken { nic: 3, count: u64::MAX },
        Say::Withdraw(tenant),
        Say::Withdrawn(tenant),
        Say::Move { turn: Turn(2), ports },
        Say::Moved { turn: Turn(2), sent: Counts::from_slice(&[1, u64::MAX]).unwrap() },
        Say::Open { turns: Turns { asks: Turn(1), opens: Turn(2) }, pairs: Pairs::one(0, 7) },
        Say::Opened { turns: Turns { asks: Turn(2), opens: Turn(1) }, pairs: Pairs::one(7, 0) },
    ] {
        all.push(Message::Session { token: 0xfeed_beef, say });
    }
    all
}

#[test]
fn every_message_comes_back_and_no_other_bytes_are_one() {
    let claim = encoded(&claim(1, 16));
    for message in messages(&claim) {
        let mut bytes = [0; DATAGRAM_MAX];
        let len = message.encode(&mut bytes).unwrap();
        let whole = &bytes[..len];
        assert_eq!(Message::decode(whole).as_ref(), Ok(&message));
        // A claim is the rest of its message: what is cut off or changed of it, the claim's reader sees.
        let carries = matches!(message, Message::Prove { .. } | Message::Accept { .. });
        let fixed = if carries { len - claim.len() } else { len };
        for cut in 0..fixed {
            assert_eq!(
                Message::decode(&whole[..cut]),
                Err(Malformed::Bytes),
                "{cut} of {message:?}"
            );
            assert_eq!(message.encode(&mut [0; DATAGRAM_MAX][..cut]), None);
        }
        for at in 0..len {
            for changed in (0..8).map(|bit| whole[at] ^ 1 << bit) {
                let mut other = Vec::from(whole);
                other[at] = changed;
                if let Ok(read) = Message::decode(&other) {
                    let mut again = [0; DATAGRAM_MAX];
                    let len = read.encode(&mut again).unwrap();
                    assert_eq!(&again[..len], &other[..], "two encodings of {read:?}");
                }
            }
        }
        if !carries {
            let mut longer = Vec::from(whole);
            longer.push(0);
            assert_eq!(Message::decode(&longer), Err(Malformed::Bytes), "{message:?}");
        }
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = [0; DATAGRAM_MAX];
    let say = Say::Ready { gone: 0 };
    let len = Message::Session { token: 1, say }.encode(&mut bytes).unwrap();
    bytes[4..6].copy_from_slice(&(PROTOCOL_VERSION + 1).to_le_bytes());
    let theirs = PROTOCOL_VERSION + 1;
    assert_eq!(Message::decode(&bytes[..len]), Err(Malformed::Version { theirs }));
}

/// Whoever calls in another version can be refused, and hears of it: whatever version, and nothing but that.
#[test]
fn calls_and_refusals_are_understood_in_all_versions() {
    let claim = encoded(&claim(1, 16));
    for message in messages(&claim) {
        let mut bytes = [0; DATAGRAM_MAX];
        let len = message.encode(&mut bytes).unwrap();
        let is_for_all = matches!(message, Message::Call { .. } | Message::Refuse { .. });
        for theirs in 0..=u16::MAX {
            bytes[4..6].copy_from_slice(&theirs.to_le_bytes());
            let read = Message::decode_of_any_version(&bytes[..len]);
            let version = Malformed::Version { theirs };
            let expected = if is_for_all { Ok((theirs, message.clone())) } else { Err(version) };
            assert_eq!(read, expected);
            let here = if theirs == PROTOCOL_VERSION { Ok(message.clone()) } else { Err(version) };
            assert_eq!(Message::decode(&bytes[..len]), here);
        }
    }
}

#[test]
fn claims_come_back_or_are_refused() {
    for (nics, len) in [(1, 1), (2, 16), (8, NIC_ADDRESS_MAX)] {
        let claim = claim(nics, len);
        let whole = encoded(&claim);
        assert_eq!(Claim::decode(&whole).as_ref(), Ok(&claim));
        for cut in 0..whole.len() {
            assert_eq!(Claim::decode(&whole[..cut]), Err(Malformed::Bytes));
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut other = whole.clone();
                other[at] ^= 1 << bit;
                if let Ok(read) = Claim::decode(&other) {
                    assert_eq!(encoded(&read), other);
                }
            }
        }
    }
    let none = Claim { grant: 0, ..claim(1, 4) };
    assert_eq!(Claim::decode(&encoded(&none)), Err(Malformed::Bytes));
    let most = Claim { gone: Parts::MAX, ..claim(1, 4) };
    assert_eq!(Claim::decode(&encoded(&most)), Ok(most.clone()));
    for gone in [Parts::MAX + 1, u8::MAX] {
        let more = Claim { gone, ..most.clone() };
        assert_eq!(Claim::decode(&encoded(&more)), Err(Malformed::Bytes));
    }
    let fewer = Claim { ports: claim(1, 4).ports, ..claim(2, 4) };
    assert_eq!(Claim::decode(&encoded(&fewer)), Err(Malformed::Bytes));
}

#[test]
fn the_longest_message_fits() {
    let claim = encoded(&claim(8, NIC_ADDRESS_MAX));
    let door = address(NIC_ADDRESS_MAX, 1);
    let nonces = Nonces { initiator: [0; 32], acceptor: [0; 32] };
    let longest = Message::Prove { nonces, door, proof: [0; 32], claim: &claim };
    let len = longest.encode(&mut [0; DATAGRAM_MAX]).unwrap();
    assert!(
        messages(&claim).iter().all(|other| other.encode(&mut [0; DATAGRAM_MAX]).unwrap() <= len)
    );
}

/// All sequences of up to five of three calls, with room for none to three.
#[test]
fn the_last_calls_given_up_are_known_with_their_doors() {
    fn holds<const N: usize>(calls: &[u8]) {
        let mut given_up = GivenUp::<usize, N>::default();
        for (door, call) in calls.iter().enumerate() {
            given_up.note([*call; 32], door);
        }
        let last = calls.len().saturating_sub(N);
        for call in 0..3 {
            // A nonce is never used again; if it were, the call of the oldest would be the one.
            let first = (last..calls.len()).find(|at| calls[*at] == call);
            assert_eq!(given_up.answered(&[call; 32]).copied(), first, "{calls:?}, {N}");
        }
    }
    for len in 0..=5 {
        for code in 0..3_u32.pow(len) {
            let digit = |at| u8::try_from(code / 3_u32.pow(at) % 3).unwrap();
            let calls: Vec<u8> = (0..len).map(digit).collect();
            holds::<0>(&calls);
            holds::<1>(&calls);
            holds::<2>(&calls);
            holds::<3>(&calls);
        }
    }
}

#[test]
fn what_is_not_answered_is_repeated_ever_more_rarely() {
    let mut retry = Retry::start(Time::ZERO);
    let (mut now, mut sent) = (Time::ZERO, Vec::new());
    while now < Time::ZERO.after(Duration::from_secs(5)) {
        if retry.is_due(now) {
            sent.push(now.as_nanos() / 1_000_000);
        }
        now = now.after(Duration::from_millis(10));
    }
    assert_eq!(sent, [50, 150, 350, 750, 1550, 2550, 3550, 4550]);
    assert_eq!(retry.due(), Time::from_nanos(5_550_000_000));
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Became {
    Taken,
    Refused,
    Delivered,
    /// Held back for so long before.
    Undelivered(Duration),
}

/// Whether nobody is believed to be there, by all that has become of messages.
fn is_over(history: &[(Time, Became)], now: Time) -> bool {
    let refused_last = history.iter().rev().find_map(|&(_, became)| match became {
        Became::Refused => Some(true),
        Became::Taken => Some(false),
        Became::Delivered | Became::Undelivered(_) => None,
    });
    let delivered = history.iter().rposition(|&(_, became)| became == Became::Delivered);
    let mut after = history.iter().skip(delivered.map_or(0, |at| at + 1));
    let first = after.find_map(|&(at, became)| match became {
        Became::Refused => Some(at),
        Became::Undelivered(held) => Some(Time::ZERO.after(at.since(Time::ZERO.after(held)))),
        Became::Taken | Became::Delivered => None,
    });
    refused_last == Some(true) && first.is_some_and(|first| now.since(first) > Uptake::PATIENCE)
}

#[test]
fn who_is_taken_for_and_not_reached_is_given_up_as_soon_as_who_is_never_taken_for() {
    let step = Duration::from_millis(700);
    let all = [
        Became::Taken,
        Became::Refused,
        Became::Delivered,
        Became::Undelivered(Duration::ZERO),
        Became::Undelivered(Duration::from_millis(1_500)),
    ];
    let (len, mut overs) = (6, 0);
    for mut number in 0..all.len().pow(len) {
        let (mut uptake, mut history) = (Uptake::default(), Vec::new());
        let mut now = Time::ZERO.after(Duration::from_secs(2));
        for _ in 0..len {
            let became = all[number % all.len()];
            number /= all.len();
            match became {
                Became::Taken => uptake.taken(),
                Became::Refused => uptake.refused(now),
                Became::Delivered => uptake.delivered(),
                Became::Undelivered(held) => {
                    uptake.undelivered(Time::ZERO.after(now.since(Time::ZERO.after(held))));
                }
            }
            history.push((now, became));
            let refused = became == Became::Refused;
            let again = uptake.again();
            assert!(!refused || again == Some(now.after(Uptake::ASK_AGAIN)), "{history:?}");
            now = now.after(step);
            assert_eq!(uptake.is_over(now), is_over(&history, now), "{history:?}");
            overs += u32::from(uptake.is_over(now));
        }
    }
    assert!(overs > 1_000, "{overs}");
}
