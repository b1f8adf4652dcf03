use std::format;
use std::string::{String, ToString};
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

fn nic(speed_gbps: u32, address: &[u8]) -> NicAddr {
    NicAddr { speed_gbps, address: heapless::Vec::from_slice(address).unwrap() }
}

fn addr(provider: ProviderKind, engine: u64, nics: &[NicAddr]) -> NetAddr {
    NetAddr::new(provider, EngineId(engine), nics).unwrap()
}

fn longest_addr() -> NetAddr {
    let nics: Vec<_> =
        (1..=8_u8).map(|n| nic(u32::MAX - u32::from(n), &[n; NIC_ADDRESS_MAX])).collect();
    addr(ProviderKind::Libfabric, 0xfedc_ba98_7654_3210, &nics)
}

fn addrs() -> Vec<NetAddr> {
    vec![
        addr(ProviderKind::Shm, 0, &[nic(0, b"")]),
        addr(ProviderKind::Verbs, u64::MAX, &[nic(400, &[0xff; 26])]),
        addr(ProviderKind::Nvlink, 7, &[nic(1, b"a"), nic(2, b""), nic(3, b"abc")]),
        addr(ProviderKind::Sim, 1 << 63, &[nic(1, &[0; 5])]),
        longest_addr(),
    ]
}

fn desc(owner: u64, len: u64, keys: &[u64]) -> MrDesc {
    MrDesc {
        owner: EngineId(owner),
        base: 0x7f00_1234_5000,
        len,
        generation: 0x0102_0304,
        rights: Rights::REMOTE_WRITE,
        keys: Keys::new(keys).unwrap(),
    }
}

fn descs() -> Vec<MrDesc> {
    let source = MrDesc { rights: Rights::LOCAL, ..desc(2, 0, &[0]) };
    vec![source, desc(u64::MAX, u64::MAX, &[1, 2, 3]), desc(9, 1 << 40, &[u64::MAX; 8])]
}

fn hello(address: NetAddr, slots: u8, slot_bytes: u32) -> Hello {
    let keys = vec![5; address.nics().len()];
    let geometry = Geometry::new(slots, slot_bytes).unwrap();
    let mailbox = desc(address.engine().0, geometry.bytes(), &keys);
    Hello { address, mailbox, geometry, heartbeat_ms: 500, call: 0x0102_0304_0506_0708 }
}

fn hellos() -> Vec<Hello> {
    let small = addrs().swap_remove(0);
    vec![hello(small, 1, 64), hello(longest_addr(), 64, 1 << 16)]
}

const REFUSALS: [Refusal; 11] = [
    Refusal::Version { ours: 0, theirs: 0 },
    Refusal::Version { ours: 1, theirs: u16::MAX },
    Refusal::Busy,
    Refusal::Unauthorised,
    Refusal::Crossed,
    Refusal::ShuttingDown,
    Refusal::Myself,
    Refusal::Malformed,
    Refusal::Stale,
    Refusal::NoWay,
    Refusal::Elsewhere,
];

fn encoded<T: Wire>(value: &T) -> Vec<u8> {
    let mut out = vec![0xaa; T::ENCODED_MAX];
    let len = value.encode(&mut out).unwrap();
    assert!(out[len..].iter().all(|byte| *byte == 0xaa), "bytes behind the frame were written");
    out.truncate(len);
    out
}

/// Whatever `bytes` are: an error, or a value whose frame they are.
fn refused_or_canonical<T: Wire + fmt::Debug>(bytes: &[u8]) {
    if let Ok(value) = T::decode(bytes) {
        assert_eq!(encoded(&value), bytes, "{value:?}");
    }
}

/// A length as a frame's head has it.
fn len_bytes(len: usize) -> [u8; 2] {
    u16::try_from(len).unwrap().to_le_bytes()
}

fn check_frame<T: Wire + PartialEq + fmt::Debug>(value: &T) {
    let frame = encoded(value);
    assert_eq!(T::decode(&frame).as_ref(), Ok(value));
    for len in 0..frame.len() {
        let error = T::decode(&frame[..len]).unwrap_err();
        assert!(matches!(error, WireError::Truncated { .. }), "{len}: {error}");
        let error = value.encode(&mut vec![0; len]).unwrap_err();
        assert!(matches!(error, WireError::BufferTooSmall { .. }), "{len}: {error}");
    }
    for extra in 1..3 {
        let mut longer = frame.clone();
        longer.resize(frame.len() + extra, 0);
        let offset = frame.len();
        assert_eq!(T::decode(&longer), Err(WireError::TrailingBytes { offset, extra }));
        longer[6..8].copy_from_slice(&len_bytes(offset + extra));
        assert_eq!(T::decode(&longer), Err(WireError::TrailingBytes { offset, extra }));
    }
    let mut changed = frame.clone();
    // Of the longest frames, whose bytes are alike, one changed bit at a time will do.
    let changes: Vec<u8> = if frame.len() < 200 {
        (1..=u8::MAX).collect()
    } else {
        (0..8).map(|bit| 1 << bit).collect()
    };
    for at in 0..frame.len() {
        for change in &changes {
            changed[at] = frame[at] ^ change;
            refused_or_canonical::<T>(&changed);
        }
        changed[at] = frame[at];
    }
}

#[test]
fn frames_come_back_and_every_near_miss_is_refused_or_another_value() {
    addrs().iter().for_each(check_frame);
    descs().iter().for_each(check_frame);
    hellos().iter().for_each(check_frame);
    REFUSALS.iter().for_each(check_frame);
}

#[test]
fn the_longest_frames_are_as_long_as_announced() {
    assert_eq!(encoded(&longest_addr()).len(), NetAddr::ENCODED_MAX);
    assert_eq!(encoded(&descs()[2]).len(), MrDesc::ENCODED_MAX);
    assert_eq!(encoded(&hellos()[1]).len(), Hello::ENCODED_MAX);
    assert_eq!(encoded(&Refusal::Busy).len(), Refusal::ENCODED_MAX);
}

/// The layouts, written out by hand: a change of them is a change of version.
#[test]
fn layouts_are_fixed() {
    let address = addr(ProviderKind::Verbs, 0x0807_0605_0403_0201, &[nic(400, &[0xab, 0xcd])]);
    let expected = b"IWna\x01\x00\x19\x00\x02\x01\x02\x03\x04\x05\x06\x07\x08\x01\
                     \x90\x01\x00\x00\x02\xab\xcd";
    assert_eq!(encoded(&address), expected);

    let region = MrDesc { base: 0x10, ..desc(3, 0x20, &[0x99]) };
    let expected = b"IWmr\x01\x00\x2e\x00\x03\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0\
                     \x04\x03\x02\x01\x01\x01\x99\0\0\0\0\0\0\0";
    assert_eq!(encoded(&region), expected);

    let small = hello(addr(ProviderKind::Shm, 3, &[nic(1, b"x")]), 2, 128);
    let mut expected = b"IWhi\x03\x00\x62\x00\x02\0\0\0\x80\0\0\0\xf4\x01\0\0\
                         \x08\x07\x06\x05\x04\x03\x02\x01"
        .to_vec();
    expected.extend(encoded(&small.address));
    expected.extend(encoded(&small.mailbox));
    assert_eq!(encoded(&small), expected);

    let refusal = Refusal::Version { ours: 1, theirs: 2 };
    assert_eq!(encoded(&refusal), b"IWno\x01\x00\x0e\x00\x01\0\x01\0\x02\0");
}

#[test]
fn each_error_says_what_was_found() {
    let frame = encoded(&addrs()[0]);
    let decode = |at: usize, byte: u8| {
        let mut changed = frame.clone();
        changed[at] = byte;
        NetAddr::decode(&changed).unwrap_err()
    };
    assert_eq!(decode(0, b'X'), WireError::Magic { expected: *b"IWna", found: *b"XWna" });
    assert_eq!(decode(4, 9), WireError::Version { expected: 1, found: 9 });
    assert_eq!(decode(6, 7), WireError::Truncated { offset: 0, needed: 8, found: 7 });
    assert_eq!(decode(8, 77), WireError::Provider { found: 77 });
    assert_eq!(decode(17, 0), no_nics(0));
    assert_eq!(decode(17, 2), WireError::Truncated { offset: 23, needed: 5, found: 0 });
    assert_eq!(decode(22, 49), WireError::AddressTooLong { nic: 0, found: 49 });
    assert_eq!(decode(8, 77).to_string(), "provider number 77 is not known");
    assert_eq!(NetAddr::new(ProviderKind::Shm, EngineId(0), &[]).unwrap_err(), no_nics(0));
    let nine = vec![nic(1, b""); 9];
    assert_eq!(NetAddr::new(ProviderKind::Shm, EngineId(0), &nine).unwrap_err(), no_nics(9));
    let mut none = frame[..18].to_vec();
    (none[6], none[17]) = (18, 0);
    assert_eq!(NetAddr::decode(&none), Err(no_nics(0)));
    let mut nine = frame[..18].to_vec();
    nine.extend([0; 9 * 5]);
    (nine[6], nine[17]) = (18 + 9 * 5, 9);
    assert_eq!(NetAddr::decode(&nine), Err(no_nics(9)));

    let mut frame = encoded(&descs()[0]);
    frame[36] = 3;
    assert_eq!(MrDesc::decode(&frame), Err(WireError::Rights { found: 3 }));
    let mut frame = encoded(&descs()[0])[..38].to_vec();
    (frame[6], frame[37]) = (38, 0);
    assert_eq!(MrDesc::decode(&frame), Err(WireError::KeyCount { found: 0 }));

    let mut frame = encoded(&Refusal::Busy);
    frame[8] = 200;
    assert_eq!(Refusal::decode(&frame), Err(WireError::RefusalCode { found: 200 }));
    frame[8] = 2;
    frame[12] = 1;
    assert_eq!(Refusal::decode(&frame), Err(WireError::Reserved { found: 1 << 16 }));
}

fn no_nics(found: usize) -> WireError {
    WireError::NicCount { found }
}

/// A hello whose parts disagree is neither written nor, if another writes it, read.
#[test]
fn a_hello_agrees_with_itself() {
    let good = hello(addr(ProviderKind::Shm, 3, &[nic(1, b"x")]), 2, 128);
    let with = |mailbox: MrDesc| Hello { mailbox, ..good.clone() };
    let (engine, owner) = (EngineId(3), EngineId(4));
    let cases = [
        (MrDesc { owner, ..good.mailbox }, WireError::MailboxOwner { engine, owner }),
        (
            MrDesc { keys: Keys::new(&[1, 2]).unwrap(), ..good.mailbox },
            WireError::MailboxKeys { nics: 1, keys: 2 },
        ),
        (MrDesc { rights: Rights::LOCAL, ..good.mailbox }, WireError::MailboxNotWritable),
        (
            MrDesc { len: 767, ..good.mailbox },
            WireError::MailboxTooSmall { needed: 768, found: 767 },
        ),
        // The slots would wrap around the end of the address space.
        (
            MrDesc { base: u64::MAX - 10, ..good.mailbox },
            WireError::MailboxTooSmall { needed: 768, found: 768 },
        ),
    ];
    for (mailbox, error) in cases {
        assert_eq!(with(mailbox).encode(&mut [0; Hello::ENCODED_MAX]), Err(error));
        let mut frame = encoded(&good)[..28].to_vec();
        frame.extend(encoded(&good.address));
        frame.extend(encoded(&mailbox));
        let len = len_bytes(frame.len());
        frame[6..8].copy_from_slice(&len);
        assert_eq!(Hello::decode(&frame), Err(error));
    }
    let mut frame = encoded(&good);
    frame[8] = 65;
    let slots = GeometryError::Slots { found: 65 };
    assert_eq!(Hello::decode(&frame), Err(WireError::Geometry(slots)));
    frame[8] = 2;
    frame[11] = 1;
    assert_eq!(Hello::decode(&frame), Err(WireError::Reserved { found: 1 << 16 }));
}

/// Whoever is spoken to in another version can still say so.
#[test]
fn another_protocol_version_is_recognised() {
    let mut frame = encoded(&hellos()[0]);
    frame[4..6].copy_from_slice(&300_u16.to_le_bytes());
    frame.truncate(11);
    let found = WireError::Version { expected: PROTOCOL_VERSION, found: 300 };
    assert_eq!(Hello::decode(&frame), Err(found));
}

#[test]
fn provider_numbers_and_names_are_theirs_alone() {
    for number in 0..=u8::MAX {
        let kind = ProviderKind::from_number(number);
        assert_eq!(kind.is_some(), (1..=7).contains(&number), "{number}");
        assert!(kind.is_none_or(|kind| kind.number() == number));
        assert_eq!(kind.and_then(|kind| ProviderKind::from_name(kind.name())), kind);
    }
    assert_eq!(ProviderKind::from_name("SHM"), None);
}

#[test]
fn the_checksum_is_the_known_one() {
    // The check value published for this polynomial, and the examples of RFC 3720, B.4.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
}

/// The text form by way of a string of binary digits.
fn slow_text(address: &NetAddr) -> String {
    let frame = encoded(address);
    let mut bits: String = frame[9..].iter().map(|byte| format!("{byte:08b}")).collect();
    for byte in crc32c(&frame).to_le_bytes() {
        bits += &format!("{byte:08b}");
    }
    while !bits.len().is_multiple_of(5) {
        bits.push('0');
    }
    let digits = bits.as_bytes().chunks(5).map(|five| {
        let value = u8::from_str_radix(core::str::from_utf8(five).unwrap(), 2).unwrap();
        char::from(if value < 26 { b'a' + value } else { b'2' + value - 26 })
    });
    format!("iw1:{}:", address.provider()) + &digits.collect::<String>()
}

#[test]
fn texts_come_back_and_survive_a_shell() {
    for address in addrs() {
        let text = address.to_string();
        assert_eq!(text, slow_text(&address));
        assert!(text.bytes().all(|c| c == b':' || c.is_ascii_lowercase() || c.is_ascii_digit()));
        assert_eq!(text.parse(), Ok(address));
    }
    // RFC 4648's alphabet and order, by hand: 13 zero bits, then the length of the NIC's address...
    let text = addrs().swap_remove(0).to_string();
    assert!(text.starts_with("iw1:shm:aaaaaaaaaaaaa"), "{text}");
}

/// Every wrong, missing, added or swapped character is noticed.
#[test]
fn every_small_slip_is_refused() {
    for address in addrs().into_iter().take(4) {
        let text = address.to_string();
        let chars: Vec<char> = text.chars().collect();
        let parse = |chars: &[char]| chars.iter().collect::<String>().parse::<NetAddr>();
        for at in 0..chars.len() {
            parse(&chars[..at]).unwrap_err();
            for other in "abcdefghijklmnopqrstuvwxyz0123456789:A /\u{e9}".chars() {
                let mut slip = chars.clone();
                slip[at] = other;
                assert_eq!(parse(&slip).is_ok(), other == chars[at], "{at} {other}");
                slip.insert(at, chars[at]);
                parse(&slip).unwrap_err();
            }
            let mut slip = chars.clone();
            slip.remove(at);
            parse(&slip).unwrap_err();
            if let Some(next) = chars.get(at + 1).filter(|next| **next != chars[at]) {
                slip.clone_from(&chars);
                slip[at] = *next;
                slip[at + 1] = chars[at];
                parse(&slip).unwrap_err();
            }
        }
    }
}

#[test]
fn text_errors_say_what_is_wrong() {
    let parse = |text: &str| text.parse::<NetAddr>().unwrap_err().to_string();
    let good = addrs().swap_remove(0).to_string();
    assert_eq!(parse("tcp://host"), "an address starts with \"iw1:\"");
    assert_eq!(
        parse("iw1:avian-carrier-with-quality-of-service:aaaa"),
        "provider \"avian-carrier-wi\" is not known, only shm verbs libfabric nvlink sim shm-libfabric shm-verbs"
    );
    assert_eq!(
        parse("iw1:shm:ab cd"),
        "character ' ' at offset 10: an address has only lower-case letters and the digits 2 to 7 \
         there"
    );
    for mistyped in [&good[..good.len() - 1], &good.replace("shm", "sim"), "iw1:shm:", "iw1:shm"] {
        assert_eq!(parse(mistyped), "checksum does not match: mistyped or truncated");
    }
    let long = "iw1:shm:".to_string() + &"a".repeat(TEXT_MAX + 1);
    assert!(parse(&long).contains("more than the"), "{}", parse(&long));
    assert_eq!(longest_addr().to_string().len(), "iw1:libfabric:".len() + TEXT_MAX);
}

fn any_addr() -> impl Strategy<Value = NetAddr> {
    let bytes = prop::collection::vec(any::<u8>(), 0..=NIC_ADDRESS_MAX);
    let nics = prop::collection::vec((any::<u32>(), bytes), 1..=MAX_NICS);
    (0..5_usize, any::<u64>(), nics).prop_map(|(kind, engine, nics)| {
        let nics: Vec<_> = nics.iter().map(|(speed, bytes)| nic(*speed, bytes)).collect();
        addr(ProviderKind::ALL[kind], engine, &nics)
    })
}

fn any_desc() -> impl Strategy<Value = MrDesc> {
    let keys = prop::collection::vec(any::<u64>(), 1..=MAX_NICS);
    (any::<[u64; 3]>(), any::<u32>(), any::<bool>(), keys).prop_map(
        |([owner, base, len], generation, remote, keys)| MrDesc {
            owner: EngineId(owner),
            base,
            len,
            generation,
            rights: if remote { Rights::REMOTE_WRITE } else { Rights::LOCAL },
            keys: Keys::new(&keys).unwrap(),
        },
    )
}

fn any_hello() -> impl Strategy<Value = Hello> {
    (any_addr(), 1..=64_u8, any::<u32>(), any::<u32>(), any::<u64>()).prop_map(
        |(address, slots, lines, heartbeat_ms, call)| {
            // As many as there may be of so many slots.
            let lines = lines % ((1 << 22) / u32::from(slots)) + 1;
            Hello { heartbeat_ms, call, ..hello(address, slots, lines * 64) }
        },
    )
}

fn try_all(bytes: &[u8]) {
    refused_or_canonical::<NetAddr>(bytes);
    refused_or_canonical::<MrDesc>(bytes);
    refused_or_canonical::<Hello>(bytes);
    refused_or_canonical::<Refusal>(bytes);
}

proptest! {
    #[test]
    fn any_value_comes_back(address in any_addr(), region in any_desc(), hello in any_hello()) {
        prop_assert_eq!(&address.to_string(), &slow_text(&address));
        prop_assert_eq!(address.to_string().parse(), Ok(address.clone()));
        prop_assert_eq!(NetAddr::decode(&encoded(&address)), Ok(address));
        prop_assert_eq!(MrDesc::decode(&encoded(&region)), Ok(region));
        prop_assert_eq!(Hello::decode(&encoded(&hello)), Ok(hello));
    }

    #[test]
    fn any_bytes_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..700)) {
        try_all(&bytes);
    }

    /// Bytes behind a right head, so that the body is looked at.
    #[test]
    fn any_body_is_harmless(body in prop::collection::vec(0..80_u8, 0..200), magic in 0..4_usize) {
        let (magic, version) =
            [(*b"IWna", 1), (*b"IWmr", 1), (*b"IWhi", PROTOCOL_VERSION), (*b"IWno", 1)][magic];
        let mut bytes = [&magic[..], &version.to_le_bytes(), &len_bytes(body.len() + 8)].concat();
        bytes.extend(body);
        try_all(&bytes);
    }

    #[test]
    fn a_hello_with_several_wrong_bytes_is_harmless(
        hello in any_hello(),
        slips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = encoded(&hello);
        for (at, byte) in slips {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        try_all(&bytes);
    }

    #[test]
    fn any_text_is_harmless(text in "(iw1:(shm|verbs)?:?)?\\PC{0,60}", digits in "[a-z2-7]{0,80}") {
        prop_assert!(text.parse::<NetAddr>().is_err());
        let text = format!("iw1:shm:{digits}");
        prop_assert!(text.parse::<NetAddr>().is_err());
    }
}
