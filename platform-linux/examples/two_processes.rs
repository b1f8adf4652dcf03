//! One process offers memory, another writes there; the first counts the write, and reads it.
//!
//!     cargo run -p immwire --example two_processes
//!
//! The second process is this program again. All it is told is an address, as text: it could as well be on another host, with
//! `Transport::Verbs` or `Transport::Libfabric` given to both builders.

use std::error::Error;
use std::process::Command;
use std::time::Duration;

use immwire::core::imm::ImmTag;
use immwire::core::wire::Wire;
use immwire::{MrDesc, SingleWrite, TransferEngine};

const PATIENCE: Duration = Duration::from_secs(10);
const TEXT: &[u8] = b"a write is there when it is counted";

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        None => receive(),
        Some(address) => send(&address),
    }
}

fn receive() -> Result<(), Box<dyn Error>> {
    let engine = TransferEngine::builder().build()?;
    let (memory, counter) = (engine.alloc(4096)?, engine.counter()?);
    let address = engine.address().to_string();
    println!("receiver: my address is {address}");
    let mut sender = Command::new(std::env::current_exe()?).arg(&address).spawn()?;

    // Whoever asks is told where it may write, and what to count it by.
    let asked = engine.recv(PATIENCE)?;
    let mut offer = vec![0; MrDesc::ENCODED_MAX];
    let len = memory.desc().encode(&mut offer)?;
    offer.truncate(len);
    offer.extend(counter.tag().bits().to_le_bytes());
    engine.submit_send(asked.from, &offer)?.wait(PATIENCE)?.ok()?;

    counter.wait(1, PATIENCE)?;
    let mut text = vec![0; TEXT.len()];
    memory.read(0, &mut text)?;
    println!("receiver: {:?} has come from {}", String::from_utf8_lossy(&text), asked.from);
    let ended = sender.wait()?;
    if ended.success() && text == TEXT { Ok(()) } else { Err("it went wrong".into()) }
}

fn send(address: &str) -> Result<(), Box<dyn Error>> {
    let engine = TransferEngine::builder().build()?;
    let peer = engine.add_peer(&address.parse()?)?;
    engine.wait_peer(peer, PATIENCE)?;
    engine.submit_send(peer, b"where may I write?")?.wait(PATIENCE)?.ok()?;
    let offer = engine.recv(PATIENCE)?.bytes;
    let (desc, tag) = offer.split_last_chunk().ok_or("no offer")?;
    let (desc, tag) = (MrDesc::decode(desc)?, ImmTag::from_bits(u32::from_le_bytes(*tag)));

    let src = engine.alloc(TEXT.len())?;
    src.write(0, TEXT)?;
    let write = SingleWrite {
        peer,
        src: &src,
        src_offset: 0,
        dst: &desc,
        dst_offset: 0,
        len: TEXT.len() as u64,
        imm: Some(tag.ok_or("no tag")?),
    };
    engine.submit_single_write(&write)?.wait(PATIENCE)?.ok()?;
    println!("sender: written");
    Ok(())
}
