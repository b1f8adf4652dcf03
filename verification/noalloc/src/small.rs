//! Counters, queues, who was heard, splitting, peers, messages, and what bytes from outside mean.

use core::time::Duration;

use immwire_core::hazard;
use immwire_core::id::{EngineId, Time};
use immwire_core::imm::{
    Added, Armed, CounterError, CounterSlot, CounterTable, Disarmed, Imm, ImmTag, Tallies, Tally,
    TallyWriter,
};
use immwire_core::lane::{Consumer, Entry, LaneError, Producer, Word};
use immwire_core::mailbox::{
    Control, CreditError, Delivery, HEADER_BYTES, HeaderError, Inbox, InboxError, MessageHeader,
    Outbox, Reserved, SendError,
};
use immwire_core::nic::{NicState, Routes, Split, SplitRule};
use immwire_core::peer::{Action, Crossing, DownReason, Peer, resolve_crossing};
use immwire_core::pulse::Pulse;
use immwire_core::region::{LocalMr, MrDesc, RegionError};
use immwire_core::ring::{Cell, Ring};
use immwire_core::standby::{Ended, Errand, Seat, Standby};
use immwire_core::wake::{Completed, Completion, Doorbell, Progress, Ticket};
use immwire_core::wire::{Hello, NetAddr, ParseAddrError, Refusal, Wire, WireError};

type Table = CounterTable<&'static [CounterSlot]>;
type TallyTable = Tallies<&'static [Tally]>;
/// As long as a command that carries a request.
type Command = [u64; 40];
type Commands = Ring<Command, &'static mut [Cell<Command>]>;

// ---- counters ----

#[unsafe(no_mangle)]
extern "C" fn hp_imm_add(table: &Table, bits: u32, out: &mut Added) {
    *out = table.add(Imm::from_bits(bits));
}

#[unsafe(no_mangle)]
extern "C" fn hp_imm_arm(
    table: &Table,
    tag: &ImmTag,
    writes: u64,
    out: &mut Result<Armed, CounterError>,
) {
    *out = table.arm(*tag, writes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_imm_disarm(
    table: &Table,
    tag: &ImmTag,
    writes: u64,
    out: &mut Result<Disarmed, CounterError>,
) {
    *out = table.disarm(*tag, writes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_imm_consume(
    table: &Table,
    tag: &ImmTag,
    writes: u64,
    out: &mut Result<bool, CounterError>,
) {
    *out = table.consume(*tag, writes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_imm_retire(table: &Table, tag: &ImmTag, out: &mut Result<u64, CounterError>) {
    *out = table.retire(*tag);
}

#[unsafe(no_mangle)]
extern "C" fn hp_imm_missing(
    table: &Table,
    tag: &ImmTag,
    out: &mut Result<Option<u64>, CounterError>,
) {
    *out = table.missing(*tag);
}

#[unsafe(no_mangle)]
extern "C" fn hp_imm_available(table: &Table, tag: &ImmTag, out: &mut Result<u64, CounterError>) {
    *out = table.available(*tag);
}

#[unsafe(no_mangle)]
extern "C" fn hp_tally_record(
    tallies: &mut TallyWriter<&'static [Tally]>,
    bits: u32,
    peer: u16,
) -> bool {
    tallies.record(Imm::from_bits(bits), peer)
}

#[unsafe(no_mangle)]
extern "C" fn hp_tally_units(tallies: &TallyTable, slot: u16, peer: u16, out: &mut Option<u64>) {
    *out = tallies.units(slot, peer);
}

#[unsafe(no_mangle)]
extern "C" fn hp_tally_retire(tallies: &TallyTable, tag: &ImmTag) -> bool {
    tallies.retire(*tag)
}

// ---- queue pairs ----

#[unsafe(no_mangle)]
extern "C" fn hp_pulse_hear(pulse: &mut Pulse, nic: u8) {
    pulse.hear(nic);
}

// ---- queues between threads and processes ----

#[unsafe(no_mangle)]
extern "C" fn hp_ring_push(ring: &Commands, value: &Command) -> bool {
    ring.try_push(*value).is_ok()
}

#[unsafe(no_mangle)]
extern "C" fn hp_ring_pop(ring: &Commands, out: &mut Option<Command>) {
    *out = ring.try_pop();
}

#[unsafe(no_mangle)]
extern "C" fn hp_lane_push(
    lane: &mut Producer,
    entries: &&[Entry],
    credit: &Word,
    value: &(u32, u64),
    out: &mut Result<(), LaneError>,
) {
    *out = lane.push(entries, credit, value.0, value.1);
}

#[unsafe(no_mangle)]
extern "C" fn hp_lane_room(lane: &mut Producer, credit: &Word, out: &mut Result<u32, LaneError>) {
    *out = lane.room(credit);
}

#[unsafe(no_mangle)]
extern "C" fn hp_lane_pop(
    lane: &mut Consumer,
    entries: &&[Entry],
    credit: &Word,
    out: &mut Result<Option<(u32, u64)>, LaneError>,
) {
    *out = lane.pop(entries, credit);
}

// ---- sleeping, and taking memory back ----

#[unsafe(no_mangle)]
extern "C" fn hp_wake_ring(bell: &Doorbell) -> bool {
    bell.ring()
}

#[unsafe(no_mangle)]
extern "C" fn hp_wake_begin(completion: &Completion, out: &mut Option<Ticket>) {
    *out = completion.begin();
}

#[unsafe(no_mangle)]
extern "C" fn hp_wake_announce(completion: &Completion, ticket: &Ticket, out: &mut Progress) {
    *out = completion.announce_sleeper(*ticket);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wake_complete(
    completion: &Completion,
    ticket: &Ticket,
    code: u8,
    out: &mut Completed,
) {
    *out = completion.complete(*ticket, code);
}

#[unsafe(no_mangle)]
extern "C" fn hp_hazard_enter(active: &Word, grant: &Word, key: u64) -> bool {
    hazard::enter(active, grant, key)
}

/// Asks a warp for a copy; the seat, or none.
#[unsafe(no_mangle)]
extern "C" fn hp_standby_ask(standby: &mut Standby, words: &&[Word], errand: &Errand) -> usize {
    let Some(seat) = Seat::new(words) else { return usize::MAX };
    standby.ask(*errand, &[seat]).unwrap_or(usize::MAX)
}

#[unsafe(no_mangle)]
extern "C" fn hp_standby_look(standby: &mut Standby, at: usize, words: &&[Word]) -> u8 {
    let Some(seat) = Seat::new(words) else { return 0 };
    match standby.look(at, seat) {
        None => 0,
        Some(Ended::Done) => 1,
        Some(Ended::NotDone) => 2,
    }
}

#[unsafe(no_mangle)]
extern "C" fn hp_standby_send(standby: &mut Standby, now: u64, words: &&[Word]) -> u32 {
    let Some(seat) = Seat::new(words) else { return 0 };
    standby.send(Time::from_nanos(now), &[seat]).unwrap_or(0)
}

// ---- splitting ----

#[unsafe(no_mangle)]
extern "C" fn hp_nic_routes(local: &&[NicState], remote: &&[NicState], out: &mut Option<Routes>) {
    *out = Routes::new(local, remote);
}

#[unsafe(no_mangle)]
extern "C" fn hp_nic_split(
    len: u64,
    dst: u64,
    routes: &Routes,
    rule: &SplitRule,
    turn: u32,
    out: &mut Split,
) {
    *out = Split::bytes(len, dst, routes, *rule, turn);
}

#[unsafe(no_mangle)]
extern "C" fn hp_nic_range(split: &Split, route: usize, start: &mut u64, end: &mut u64) {
    let range = split.range(route);
    (*start, *end) = (range.start, range.end);
}

#[unsafe(no_mangle)]
extern "C" fn hp_region_local(
    mr: &LocalMr,
    offset: u64,
    len: u64,
    out: &mut Result<u64, RegionError>,
) {
    *out = mr.range(offset, len);
}

#[unsafe(no_mangle)]
extern "C" fn hp_region_remote(
    mr: &MrDesc,
    offset: u64,
    len: u64,
    out: &mut Result<u64, RegionError>,
) {
    *out = mr.range(offset, len);
}

// ---- liveness ----

#[unsafe(no_mangle)]
extern "C" fn hp_peer_connected(peer: &mut Peer, asked: &Duration, now: &Time) {
    peer.handle_connected(*asked, *now);
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_heard(peer: &mut Peer, now: &Time) {
    peer.handle_heard(*now);
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_used(peer: &mut Peer, now: &Time, parting: &mut Option<u8>) -> bool {
    *parting = peer.parting();
    peer.handle_used(*now);
    parting.is_some_and(|round| peer.handle_stays(*now, round))
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_sent(peer: &mut Peer, now: &Time) {
    peer.handle_sent(*now);
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_timeout(peer: &mut Peer, now: &Time) {
    peer.handle_timeout(*now);
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_close(peer: &mut Peer, reason: &DownReason) {
    peer.close(*reason);
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_next_timeout(peer: &Peer, out: &mut Time) {
    *out = peer.next_timeout();
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_action(peer: &mut Peer, out: &mut Option<Action>) {
    *out = peer.poll_action();
}

#[unsafe(no_mangle)]
extern "C" fn hp_peer_crossing(mine: u64, theirs: u64, out: &mut Crossing) {
    *out = resolve_crossing(EngineId(mine), EngineId(theirs));
}

// ---- messages ----

#[unsafe(no_mangle)]
extern "C" fn hp_mailbox_control(bits: u32, out: &mut Option<Result<Control, u32>>) {
    *out = Control::decode(bits);
}

#[unsafe(no_mangle)]
extern "C" fn hp_mailbox_control_use(bits: u32) -> bool {
    matches!(Control::decode(bits), Some(Ok(control)) if control.is_use())
}

#[unsafe(no_mangle)]
extern "C" fn hp_mailbox_encode(control: &Control) -> u32 {
    control.encode()
}

#[unsafe(no_mangle)]
extern "C" fn hp_mailbox_header(bytes: &&[u8], out: &mut Result<MessageHeader, HeaderError>) {
    *out = MessageHeader::from_bytes(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_mailbox_header_bytes(header: &MessageHeader, out: &mut [u8; HEADER_BYTES]) {
    *out = header.to_bytes();
}

#[unsafe(no_mangle)]
extern "C" fn hp_outbox_reserve(
    outbox: &mut Outbox,
    len: u64,
    out: &mut Result<Reserved, SendError>,
) {
    *out = outbox.reserve(len);
}

#[unsafe(no_mangle)]
extern "C" fn hp_outbox_withdraw(
    outbox: &mut Outbox,
    reserved: &Reserved,
    out: &mut Result<(), CreditError>,
) {
    *out = outbox.withdraw(*reserved);
}

#[unsafe(no_mangle)]
extern "C" fn hp_outbox_release(outbox: &mut Outbox, slot: u8, out: &mut Result<(), CreditError>) {
    *out = outbox.release(slot);
}

#[unsafe(no_mangle)]
extern "C" fn hp_inbox_message(
    inbox: &mut Inbox,
    slot: u8,
    header: &&[u8],
    out: &mut Result<(), InboxError>,
) {
    *out = inbox.handle_message(slot, header);
}

#[unsafe(no_mangle)]
extern "C" fn hp_inbox_delivery(inbox: &mut Inbox, out: &mut Option<Delivery>) {
    *out = inbox.poll_delivery();
}

#[unsafe(no_mangle)]
extern "C" fn hp_inbox_consumed(
    inbox: &mut Inbox,
    slot: u8,
    out: &mut Result<Control, InboxError>,
) {
    *out = inbox.handle_consumed(slot);
}

// ---- bytes from outside ----

#[unsafe(no_mangle)]
extern "C" fn hp_wire_decode_addr(bytes: &&[u8], out: &mut Result<NetAddr, WireError>) {
    *out = NetAddr::decode(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wire_decode_desc(bytes: &&[u8], out: &mut Result<MrDesc, WireError>) {
    *out = MrDesc::decode(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wire_decode_hello(bytes: &&[u8], out: &mut Result<Hello, WireError>) {
    *out = Hello::decode(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wire_decode_refusal(bytes: &&[u8], out: &mut Result<Refusal, WireError>) {
    *out = Refusal::decode(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wire_encode_desc(
    desc: &MrDesc,
    bytes: &mut &mut [u8],
    out: &mut Result<usize, WireError>,
) {
    *out = desc.encode(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wire_encode_hello(
    hello: &Hello,
    bytes: &mut &mut [u8],
    out: &mut Result<usize, WireError>,
) {
    *out = hello.encode(bytes);
}

#[unsafe(no_mangle)]
extern "C" fn hp_wire_parse_addr(text: &&str, out: &mut Result<NetAddr, ParseAddrError>) {
    *out = text.parse();
}
