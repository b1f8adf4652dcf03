//! Writes the corpora's first inputs: `seeds DIR` makes `DIR/TARGET/NAME` by the real encoders.

use std::fs;
use std::path::Path;

use arbitrary::Unstructured;
use immwire::shm::fuzzing::Parts;
use immwire_cli::motor::desc_text;
use immwire_cli::push::manifest::Entry;
use immwire_cli::push::message::{Digest, FromReceiver, FromSender, Have, Keep, VERSION};
use immwire_cli::push::path::RelPath;
use immwire_cli::push::recv::STAGING;
use immwire_core::datagram::{Address, Claim, DATAGRAM_MAX, Message, Nonces, Protocol, Say};
use immwire_core::mailbox::{Control, MessageHeader, Usage};
use immwire_core::moe::TableShape;
use immwire_core::recycle::Turn;
use immwire_core::wire::Hello;
use immwire_fuzz::{address, consistent, descriptor, hello, refusal, round_trip};

fn main() -> std::io::Result<()> {
    let folder = std::env::args_os().nth(1).expect("usage: seeds DIR");
    let folder = Path::new(&folder);
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let folder = folder.join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(name), bytes)
    };
    // Decisions, for the makers of values: any bytes will do.
    for seed in 0..6_u8 {
        let choices: Vec<u8> =
            (0..600_u16).map(|n| (n as u8).wrapping_mul(37) ^ seed.wrapping_mul(91)).collect();
        let from = || Unstructured::new(&choices);
        let name = format!("made-{seed}");
        let there = address(&mut from()).expect("enough choices");
        write("net_addr", &name, &round_trip(&there))?;
        write("addr_text", &name, there.to_string().as_bytes())?;
        write("arguments", &name, format!("push\nfile\n{there}").as_bytes())?;
        write("mr_desc", &name, &round_trip(&descriptor(&mut from()).expect("enough")))?;
        write(
            "hello",
            &format!("refusal-{seed}"),
            &round_trip(&refusal(&mut from()).expect("enough")),
        )?;
        write("moe_table", &name, &table(seed))?;
        if let Ok(hello) = hello(&mut from()).map(consistent) {
            write("datagram", &name, &prove(&hello))?;
            write("hello", &name, &round_trip(&hello))?;
            let parts = Parts {
                nics: (2, 3),
                hello: round_trip(&hello),
                word: 5,
                len: 64,
                ..Parts::default()
            };
            let parts = Parts { refusal: refusal(&mut from()).ok(), ..parts };
            for kind in 0..18 {
                let (bytes, _) = parts.encode(kind).expect("possible");
                write("handshake", &format!("kind-{kind}"), &bytes)?;
            }
        }
    }
    for (name, say) in [("ready", Say::Ready { gone: 2 }), ("bye", Say::Bye { quiet: true, sent: [1, u64::MAX].into_iter().collect() })] {
        write("datagram", name, &encoded(&Message::Session { token: 9, say }))?;
    }
    // An address without NICs: refused, and hard to come by.
    let mut none = round_trip(&address(&mut Unstructured::new(&[0; 600])).expect("enough"));
    none.truncate(18);
    (none[6], none[17]) = (18, 0);
    write("net_addr", "without-nics", &none)?;
    let beats = [Usage::None, Usage::Some, Usage::Over(1), Usage::Stays(1)].map(Control::Heartbeat);
    let controls = [Control::Message(3), Control::Credit(63)].into_iter().chain(beats);
    let bits: Vec<u8> =
        controls.flat_map(|control| control.encode().to_le_bytes()).collect();
    let header = MessageHeader { len: 12, kind: 1, sequence: 2 }.to_bytes();
    write("mailbox", "controls", &bits)?;
    write("mailbox", "header", &header)?;
    write("push", "session", &session())?;
    for (name, line) in [
        ("write", "bench\nwrite\n--size\n64K,1M\n--nics\n4\n--json"),
        ("pages", "bench\npages\n--pages\n40000\n--page-size\n4K"),
        ("listen", "bench\n--listen\n--nics\n2"),
        ("recv", "recv\n--dir\ninbox\n--once\n--patience\n5"),
        ("doctor", "doctor\n--json"),
        ("size", "64KiB"),
        ("plain", "4096"),
    ] {
        write("arguments", name, line.as_bytes())?;
    }
    Ok(())
}

/// The longest message of a call.
fn prove(hello: &Hello) -> Vec<u8> {
    let port = Address::from_slice(&[3; 16]).expect("short");
    let claim = Claim {
        token: 1,
        grant: 2,
        protocol: Protocol { number: 5, version: 1, data_bytes: 8 },
        turn: Turn(0),
        ports: hello.address.nics().iter().map(|_| port.clone()).collect(),
        gone: 0,
        hello: hello.clone(),
    };
    let mut bytes = [0; DATAGRAM_MAX];
    let len = claim.encode(&mut bytes).expect("a good hello");
    let nonces = Nonces { initiator: [1; 32], acceptor: [2; 32] };
    encoded(&Message::Prove { nonces, door: port, proof: [4; 32], claim: &bytes[..len] })
}

fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = [0; DATAGRAM_MAX];
    let len = message.encode(&mut bytes).expect("every message fits");
    bytes[..len].to_vec()
}

/// What both sides of a resumed push say, a line each.
fn session() -> Vec<u8> {
    let entry = |path: &str, size| {
        let path = RelPath::new(path).expect("a good name");
        Entry { path, size, mode: 0o644, mtime_s: 1, mtime_ns: 2 }
    };
    let entries = vec![entry("dir", None), entry("dir/part", Some(100)), entry("whole", Some(5))];
    let choices = [1; 200];
    let region = desc_text(&descriptor(&mut Unstructured::new(&choices)).expect("enough"));
    let have = |file, bytes| Have { file, bytes, digest: Digest([9; 32]) };
    let keep = |file, bytes| Keep { file, bytes, digest: Digest([8; 32]) };
    let from_sender = [
        FromSender::Offer { version: VERSION, credit_tag: 7, entries },
        FromSender::Begin { keep: vec![keep(0, 60), keep(1, 5)] },
        FromSender::Working,
        FromSender::Failed { reason: "why".to_owned() },
    ];
    let accept = FromReceiver::Accept {
        region,
        staging: STAGING,
        slot_tags: vec![1, 2],
        have: vec![have(0, 60), have(1, 5)],
    };
    let mut text = vec![40, 12];
    for message in &from_sender {
        text.extend(serde_json::to_vec(message).expect("JSON"));
        text.push(b'\n');
    }
    for message in [accept, FromReceiver::Done] {
        text.extend(serde_json::to_vec(&message).expect("JSON"));
        text.push(b'\n');
    }
    text
}

/// Shape, number of tokens, epoch, and the table: as the target takes it.
fn table(seed: u8) -> Vec<u8> {
    let (top_k, tokens, epoch) = (1 + seed, 3 + seed, 5);
    let shape = TableShape { top_k: top_k.into(), max_tokens: tokens.into() };
    let choices = usize::from(top_k) * usize::from(tokens);
    let indices: Vec<i32> =
        (0..choices as i32).map(|n| (n * 7 + i32::from(seed)) % 40 - 1).collect();
    let weights: Vec<f32> = indices.iter().map(|index| *index as f32 / 64.0).collect();
    let mut vectors = vec![[0; 4]; shape.vectors(tokens.into()).expect("few")];
    shape.encode(epoch, &indices, &weights, &mut vectors).expect("a table");
    let words = vectors.iter().flatten().flat_map(|word| word.to_le_bytes());
    [top_k, tokens, tokens, epoch as u8].into_iter().chain(words).collect()
}
