//! The device: a thread for each enabled endpoint, which sends, receives, lands bytes and reports, whatever the
//! application does meanwhile.
//!
//! Everything that is to happen is a task with a time, chosen by [`Disorder`](crate::disorder::Disorder): an operation's pieces leave at times of
//! their own; bytes land when a piece arrives, or, for the last piece of some writes, later than their acknowledgement;
//! the target's event and the initiator's completion come late by amounts of their own. So writes overtake each other, as
//! do pieces of one write, events, and completions.
//!
//! # Invariants
//!
//! 1. The event of a write comes after all its bytes have landed; of earlier writes it says nothing.
//! 2. A write is checked at the target when its first piece arrives, and each piece when it lands.
//! 3. An operation ends once: its first end takes it out of `flights`.
//! 4. The thread sleeps at most a second at a time, and ends when [`Wired::close`] says so.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libfabric_sys as sys;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::context::Context;
use crate::disorder::Choice;
use crate::lock;
use crate::log::{self, Rule};
use crate::memory::{InUse, Region};
use crate::packet::{Address, HEAD_BYTES, Head, Kind, PIECE_BYTES, Piece, piece_bytes};
use crate::peers::Peers;
use crate::queue::Entry;
use crate::status::Status;
use crate::wired::{Op, Transfer, Wired, drain};

/// Once in so many writes the last piece lands later than the acknowledgement.
const HELD_ONCE_IN: u64 = 4;
/// How long a peer's full socket is left alone.
const FULL_FOR: Duration = Duration::from_micros(50);
/// How often a peer that owes an answer is asked whether it is there.
const PROBE: Duration = Duration::from_millis(20);
/// The longest sleep.
const IDLE: Duration = Duration::from_secs(1);
/// Packets or tasks taken in a row before the others get a turn.
const BATCH: usize = 64;

/// Starts the thread behind an endpoint, whose queue pair is `socket`.
pub(crate) fn spawn(wired: Arc<Wired>, socket: UnixDatagram) -> std::io::Result<JoinHandle<()>> {
    let name = format!("fake-efa {}", wired.number);
    let device = Device {
        wired,
        socket,
        tasks: BinaryHeap::new(),
        next_task: 0,
        flights: HashMap::new(),
        next_op: 0,
        links: HashMap::new(),
        arrivals: HashMap::new(),
        waiting: VecDeque::new(),
        packet: Vec::new(),
        counts: Counts::default(),
    };
    std::thread::Builder::new().name(name).spawn(move || device.run())
}

/// What an endpoint did, for the log.
#[derive(Debug, Default)]
struct Counts {
    /// Operations posted.
    ops: u64,
    /// Pieces sent after a later piece of the same write.
    pieces_overtaken: u64,
    /// Events of writes that came after the event of a later write of the same initiator.
    events_overtaken: u64,
    /// Writes acknowledged before all their bytes had landed.
    held: u64,
    /// Events of writes.
    events: u64,
    /// Operations that failed.
    failed: u64,
}

/// Something to be done, the earliest first.
struct Task {
    due: Instant,
    tie: u64,
    /// Makes tasks distinct.
    serial: u64,
    work: Work,
}

enum Work {
    /// A piece of an operation leaves.
    Piece { op: u64, index: u32 },
    /// Held bytes land.
    Land { region: Arc<Region>, id: u64 },
    /// A write or a message is reported at its target.
    Arrived(Arrived),
    /// Its initiator is told how it ended, by a queue pair that has been here.
    Reply { from: Address, to: Address, op: u64, status: Status },
    /// An operation ends without an answer.
    End { op: u64, status: Status },
    /// A peer's socket may have room again.
    Retry(Address),
    /// A peer is asked whether it is there.
    Probe(Address),
}

impl Ord for Task {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap's greatest is what is due first.
        (other.due, other.tie, other.serial).cmp(&(self.due, self.tie, self.serial))
    }
}

impl PartialOrd for Task {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Task {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Task {}

/// An operation in flight.
struct Flight {
    op: Op,
    /// The highest piece that was sent.
    highest: Option<u32>,
}

/// A peer, as the device knows it.
struct Link {
    /// Of its own: what waits in the queue of a peer that does not run counts against the socket that it was sent from.
    socket: Option<UnixDatagram>,
    in_flight: usize,
    /// It said something once.
    responsive: bool,
    /// When it last did, or was first asked.
    heard: Instant,
    /// It is no more: how operations to it end, and after how long.
    gone: Option<(Status, Duration)>,
    /// Pieces that found its socket full, and wait behind each other.
    parked: VecDeque<(u64, u32)>,
    probed: bool,
    /// The last of its writes that an event was reported of.
    newest_event: Option<u64>,
}

/// A write of which pieces have arrived.
struct Arrival {
    region: Option<Arc<Region>>,
    status: Status,
    pieces: u32,
}

/// A write or a message that is all here.
struct Arrived {
    from: Address,
    op: u64,
    transfer: Transfer,
    len: usize,
    /// A message's.
    payload: Vec<u8>,
}

struct Device {
    wired: Arc<Wired>,
    socket: UnixDatagram,
    tasks: BinaryHeap<Task>,
    next_task: u64,
    flights: HashMap<u64, Flight>,
    next_op: u64,
    links: HashMap<Address, Link>,
    arrivals: HashMap<(Address, u64), Arrival>,
    /// What waits for a receive to be posted.
    waiting: VecDeque<Arrived>,
    /// Room for a packet to send.
    packet: Vec<u8>,
    counts: Counts,
}

impl Device {
    fn run(mut self) {
        // A sleep of some microseconds is meant to be one. Without it the disorder is coarser.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut buffer = vec![0; HEAD_BYTES + PIECE_BYTES];
        while self.take_posts() {
            if self.wired.is_broken() {
                self.flush();
            }
            let more = self.receive(&mut buffer) | self.run_due();
            self.meet_receives();
            if !more {
                self.sleep();
            }
        }
        self.end();
    }

    /// Starts what was posted. `false` if the endpoint is being closed.
    fn take_posts(&mut self) -> bool {
        let ops = {
            let mut posted = lock(&self.wired.posted);
            if posted.close {
                return false;
            }
            std::mem::take(&mut posted.ops)
        };
        let now = Instant::now();
        for op in ops {
            let number = self.next_op;
            self.next_op += 1;
            self.counts.ops += 1;
            let due = now + self.wired.disorder.delay(Choice::Start, number, 0);
            let link = self.link(op.to);
            if link.in_flight == 0 {
                link.heard = now;
            }
            link.in_flight += 1;
            if let Some(status) = op.doomed {
                self.push(due, number, Work::End { op: number, status });
            } else if let Some((status, after)) = link.gone {
                self.push(now + after, number, Work::End { op: number, status });
            } else {
                if !std::mem::replace(&mut link.probed, true) {
                    self.push(now + PROBE, number, Work::Probe(op.to));
                }
                for index in 0..piece_count(op.len) {
                    let later =
                        self.wired.disorder.delay(Choice::Piece, number, u64::from(index)) / 4;
                    self.push(
                        due + later,
                        number ^ u64::from(index),
                        Work::Piece { op: number, index },
                    );
                }
            }
            self.flights.insert(number, Flight { op, highest: None });
        }
        true
    }

    /// Ends all that is under way and not doomed already, receives too: the queue pair is in error.
    fn flush(&mut self) {
        let under_way = self.flights.iter().filter(|(_, flight)| flight.op.doomed.is_none());
        let under_way: Vec<_> = under_way.map(|(op, flight)| (*op, flight.op.to)).collect();
        for (op, to) in under_way {
            self.finish(op, to, Status::Flushed);
        }
        let receives = std::mem::take(&mut lock(&self.wired.posted).receives);
        if !receives.is_empty() {
            log::event("flushed", &[("receives", receives.len() as u64)]);
        }
        for receive in receives {
            drop(receive.used);
            self.wired.rx.push(Entry {
                context: Some(receive.context),
                flags: sys::FI_MSG | sys::FI_RECV,
                len: 0,
                data: 0,
                source: None,
                status: Status::Flushed,
                endpoint: self.wired.number,
                _slot: Some(receive.slot),
            });
        }
    }

    fn link(&mut self, to: Address) -> &mut Link {
        let now = Instant::now();
        self.links.entry(to).or_insert_with(|| Link {
            socket: outlet().ok(),
            in_flight: 0,
            responsive: false,
            heard: now,
            gone: None,
            parked: VecDeque::new(),
            probed: false,
            newest_event: None,
        })
    }

    fn push(&mut self, due: Instant, choice: u64, work: Work) {
        let tie = self.wired.disorder.number(Choice::Tie, choice, 0);
        self.tasks.push(Task { due, tie, serial: self.next_task, work });
        self.next_task += 1;
    }

    /// Takes a batch of packets. Returns whether there may be more.
    fn receive(&mut self, buffer: &mut [u8]) -> bool {
        for _ in 0..BATCH {
            let Ok(len) = self.socket.recv(buffer) else { return false };
            let packet =
                buffer.get(..len).and_then(|packet| packet.split_first_chunk::<HEAD_BYTES>());
            let Some((head, payload)) = packet else { continue };
            let Some(head) = Head::from_bytes(head).filter(|_| !self.wired.is_broken()) else {
                continue;
            };
            self.take_packet(head.from, head, payload);
        }
        true
    }

    fn take_packet(&mut self, from: Address, head: Head, payload: &[u8]) {
        let now = Instant::now();
        if head.to != self.wired.address.qkey {
            // This number was another queue pair's: to the sender, that one does not exist.
            if matches!(head.kind, Kind::Write(_) | Kind::Send { .. } | Kind::Ping) {
                let (op, status) = (head.op, Status::RemoteQpn);
                let gone = Address { qkey: head.to, ..self.wired.address };
                self.push(now, op, Work::Reply { from: gone, to: from, op, status });
            }
            return;
        }
        let link = self.link(from);
        link.heard = now;
        link.responsive = true;
        match head.kind {
            Kind::Write(piece) => self.take_piece(from, head.op, piece, payload),
            Kind::Send { data } => {
                let due =
                    now + self.wired.late + self.wired.disorder.delay(Choice::Event, head.op, 0);
                let (transfer, payload) = (Transfer::Send { data }, payload.to_vec());
                let arrived = Arrived { from, op: head.op, transfer, len: payload.len(), payload };
                self.push(due, head.op, Work::Arrived(arrived));
            }
            Kind::Reply { status } => {
                if let Some(status) = Status::from_code(status.into()) {
                    self.finish(head.op, from, status);
                }
            }
            Kind::Ping => {
                let pong =
                    Head { from: self.wired.address, to: from.qkey, op: 0, kind: Kind::Pong };
                // One that is lost is asked for again.
                let _ = self.send(from, &pong.to_bytes());
            }
            Kind::Pong => {}
            Kind::Bye => {
                self.arrivals.retain(|(of, _), _| *of != from);
                self.lose(from, Status::RemoteQpn, Duration::ZERO);
            }
        }
    }

    /// Checks a write at its first piece.
    fn admit(&self, from: Address, piece: &Piece) -> Arrival {
        let refused = |status| Arrival { region: None, status, pieces: 0 };
        let settings = &self.wired.settings;
        if settings.direct && self.wired.peers.number(from).is_none() {
            if !self.wired.peers.knew(from) {
                log::violation(
                    Rule::PeerNotInserted,
                    "a write came from an address that was never inserted here",
                );
            }
            return refused(Status::UnknownPeer);
        }
        if settings.direct && piece.data.is_some() && piece.unsolicited != settings.unsolicited {
            return refused(Status::Feature);
        }
        match self.wired.keys.find(piece.key) {
            Some(region)
                if region.access & sys::FI_REMOTE_WRITE != 0
                    && region.covers(piece.address, u64::from(piece.total)) =>
            {
                Arrival { region: Some(region), status: Status::Ok, pieces: 0 }
            }
            _ => refused(Status::RemoteAddress),
        }
    }

    fn take_piece(&mut self, from: Address, op: u64, piece: Piece, payload: &[u8]) {
        let total = piece.total as usize;
        let expected = total.saturating_sub(piece.offset as usize).min(piece_bytes(total));
        if payload.len() != expected || piece.count != piece_count(total) {
            return; // No endpoint of ours sends this.
        }
        let mut arrival =
            self.arrivals.remove(&(from, op)).unwrap_or_else(|| self.admit(from, &piece));
        arrival.pieces += 1;
        let last = arrival.pieces == piece.count;
        let (now, disorder) = (Instant::now(), self.wired.disorder);
        let mut landed_by = now;
        if let Some(region) = &arrival.region {
            let address = piece.address.wrapping_add(u64::from(piece.offset));
            let hold = last
                && !payload.is_empty()
                && self.wired.early_ack
                && disorder.once_in(HELD_ONCE_IN, Choice::Hold, op);
            let fine = if hold {
                landed_by += disorder.delay(Choice::Hold, op, 0);
                region.hold(self.next_task, address, payload)
            } else {
                region.land(address, payload)
            };
            if !fine {
                arrival = Arrival { region: None, status: Status::RemoteAddress, ..arrival };
            } else if hold {
                self.counts.held += 1;
                let work = Work::Land { region: region.clone(), id: self.next_task };
                self.push(landed_by, op, work);
            }
        }
        if !last {
            self.arrivals.insert((from, op), arrival);
            return;
        }
        let status = arrival.status;
        let reply_due = now + disorder.delay(Choice::Reply, op, 0);
        let waits = piece.data.is_some() && !self.wired.settings.unsolicited;
        if status == Status::Ok && piece.data.is_some() {
            let transfer =
                Transfer::Write { data: piece.data, key: piece.key, address: piece.address };
            let arrived = Arrived { from, op, transfer, len: total, payload: Vec::new() };
            // Landing has the earlier time, and is done first.
            let late = self.wired.late + self.wired.late_writes;
            let due = landed_by + Duration::from_nanos(1) + late;
            let due = due + disorder.delay(Choice::Event, op, 0);
            self.push(due, op, Work::Arrived(arrived));
        }
        if status != Status::Ok || !waits {
            self.push(
                reply_due,
                op,
                Work::Reply { from: self.wired.address, to: from, op, status },
            );
        }
    }

    /// Does what is due. Returns whether there may be more.
    fn run_due(&mut self) -> bool {
        let now = Instant::now();
        for _ in 0..BATCH {
            if self.tasks.peek().is_none_or(|task| task.due > now) {
                return false;
            }
            let Some(Task { work, .. }) = self.tasks.pop() else { return false };
            match work {
                Work::Piece { op, index } => self.start_piece(op, index),
                Work::Retry(to) => self.retry(to),
                Work::Land { region, id } => region.land_held(id),
                Work::Arrived(arrived) => self.report(arrived),
                Work::Reply { from, to, op, status } => {
                    let head =
                        Head { from, to: to.qkey, op, kind: Kind::Reply { status: status as u8 } };
                    if let Err(ErrorKind::WouldBlock) = self.send(to, &head.to_bytes()) {
                        self.push(now + FULL_FOR, op, Work::Reply { from, to, op, status });
                    }
                }
                Work::End { op, status } => {
                    if let Some(flight) = self.flights.get(&op) {
                        self.finish(op, flight.op.to, status);
                    }
                }
                Work::Probe(to) => self.probe(to),
            }
        }
        true
    }

    fn send(&mut self, to: Address, packet: &[u8]) -> Result<(), ErrorKind> {
        let name =
            SocketAddr::from_abstract_name(to.socket_name()).map_err(|error| error.kind())?;
        let link = self.link(to);
        if link.socket.is_none() {
            link.socket = outlet().ok();
        }
        // Without one, as if it were full: tried again.
        let Some(socket) = &link.socket else { return Err(ErrorKind::WouldBlock) };
        socket.send_to_addr(packet, &name).map(|_| ()).map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::NotFound => ErrorKind::ConnectionRefused,
            // Full buffers, of the peer or of the kernel.
            _ => ErrorKind::WouldBlock,
        })
    }

    /// Sends a piece, or has it wait for those that could not be sent.
    fn start_piece(&mut self, number: u64, index: u32) {
        let Some(flight) = self.flights.get(&number) else { return };
        let to = flight.op.to;
        let first = self.link(to).parked.is_empty();
        if first && self.send_piece(number, index) {
            return;
        }
        self.link(to).parked.push_back((number, index));
        if first {
            self.push(Instant::now() + FULL_FOR, number, Work::Retry(to));
        }
    }

    /// Sends what could not be sent before, as far as it goes now.
    fn retry(&mut self, to: Address) {
        while let Some(&(number, index)) = self.link(to).parked.front() {
            if !self.send_piece(number, index) {
                self.push(Instant::now() + FULL_FOR, number, Work::Retry(to));
                return;
            }
            self.link(to).parked.pop_front();
        }
    }

    /// Sends a piece. `false` if its target has no room; else there is nothing more to do about it.
    fn send_piece(&mut self, number: u64, index: u32) -> bool {
        let Some(flight) = self.flights.get(&number) else { return true };
        let op = &flight.op;
        let to = op.to;
        if self.links.get(&to).is_none_or(|link| link.gone.is_some()) {
            return true;
        }
        let offset = piece_bytes(op.len).saturating_mul(index as usize);
        let len = op.len.saturating_sub(offset).min(piece_bytes(op.len));
        let kind = match op.transfer {
            Transfer::Write { data, key, address } => Kind::Write(Piece {
                data,
                unsolicited: self.wired.settings.unsolicited,
                total: u32::try_from(op.len).unwrap_or(u32::MAX),
                count: piece_count(op.len),
                offset: u32::try_from(offset).unwrap_or(u32::MAX),
                key,
                address,
            }),
            Transfer::Send { data } => Kind::Send { data },
        };
        let head = Head { from: self.wired.address, to: to.qkey, op: number, kind };
        let mut packet = std::mem::take(&mut self.packet);
        packet.clear();
        packet.extend_from_slice(&head.to_bytes());
        let taken = match &op.source {
            Some((region, address)) => {
                region.take(address.wrapping_add(offset as u64), len, &mut packet)
            }
            None => len == 0,
        };
        let sent = if taken { self.send(to, &packet) } else { Ok(()) };
        self.packet = packet;
        match sent {
            Ok(()) if !taken => self.finish(number, to, Status::LocalKey),
            Ok(()) => {
                if let Some(flight) = self.flights.get_mut(&number) {
                    self.counts.pieces_overtaken += u64::from(flight.highest > Some(index));
                    flight.highest = flight.highest.max(Some(index));
                }
            }
            Err(ErrorKind::WouldBlock) => return false,
            Err(_) => self.lose_dead(to),
        }
        true
    }

    fn probe(&mut self, to: Address) {
        let now = Instant::now();
        let silent = self.wired.silent;
        let link = self.link(to);
        if link.in_flight == 0 || link.gone.is_some() {
            link.probed = false;
            return;
        }
        if now.duration_since(link.heard) > silent {
            let status = if link.responsive { Status::Unresponsive } else { Status::Unreachable };
            self.lose(to, status, Duration::ZERO);
            return;
        }
        let ping = Head { from: self.wired.address, to: to.qkey, op: u64::MAX, kind: Kind::Ping };
        if let Err(ErrorKind::ConnectionRefused) = self.send(to, &ping.to_bytes()) {
            self.lose_dead(to);
        } else {
            self.push(now + PROBE, 0, Work::Probe(to));
        }
    }

    /// A peer's queue pair is gone, and did not say so: its process is dead, or never was.
    fn lose_dead(&mut self, to: Address) {
        let status = match (self.link(to).responsive, to.is_reachable()) {
            (true, _) => Status::Unresponsive,
            (false, true) => Status::RemoteQpn,
            (false, false) => Status::Unreachable,
        };
        self.lose(to, status, self.wired.dead);
    }

    fn lose(&mut self, to: Address, status: Status, after: Duration) {
        let link = self.link(to);
        if link.gone.is_some() {
            return;
        }
        link.gone = Some((status, after));
        link.probed = false;
        let lost = self.flights.iter().filter(|(_, flight)| flight.op.to == to).map(|(&op, _)| op);
        for op in lost.collect::<Vec<_>>() {
            self.push(Instant::now() + after, op, Work::End { op, status });
        }
    }

    /// Ends an operation to `to`: its completion can be read.
    fn finish(&mut self, number: u64, to: Address, status: Status) {
        if status == Status::RemoteQpn && number == u64::MAX {
            // The answer to a probe: this queue pair number is somebody else's now.
            return self.lose(to, Status::RemoteQpn, Duration::ZERO);
        }
        if self.flights.get(&number).is_none_or(|flight| flight.op.to != to) {
            return;
        }
        let Some(Flight { op, .. }) = self.flights.remove(&number) else { return };
        self.link(to).in_flight -= 1;
        if status != Status::Ok {
            self.counts.failed += 1;
            log::event(
                "failed",
                &[("prov_errno", status as u64), ("qpn", self.wired.address.qpn.into())],
            );
        }
        let flags = match op.transfer {
            Transfer::Write { .. } => sys::FI_RMA | sys::FI_WRITE,
            Transfer::Send { .. } => sys::FI_MSG | sys::FI_SEND,
        };
        // What it used is free before its completion can be read.
        drop(op.uses);
        self.wired.tx.push(Entry {
            context: Some(op.context),
            flags,
            len: 0,
            data: 0,
            source: None,
            status,
            endpoint: self.wired.number,
            _slot: Some(op.slot),
        });
    }

    /// Reports what has arrived, or has it wait for a receive.
    fn report(&mut self, arrived: Arrived) {
        match arrived.transfer {
            Transfer::Write { data, .. } if self.wired.settings.unsolicited => {
                self.event(&arrived, data, None)
            }
            _ => self.waiting.push_back(arrived),
        }
    }

    fn event(&mut self, arrived: &Arrived, data: Option<u32>, receive: Option<(Context, InUse)>) {
        let Arrived { from, op, len, .. } = *arrived;
        self.counts.events += 1;
        let newest = self.link(from).newest_event;
        self.counts.events_overtaken += u64::from(newest > Some(op));
        self.link(from).newest_event = newest.max(Some(op));
        let (context, slot) = receive.unzip();
        self.wired.rx.push(Entry {
            context,
            flags: sys::FI_REMOTE_CQ_DATA | sys::FI_RMA | sys::FI_REMOTE_WRITE,
            len,
            data: data.unwrap_or(0).into(),
            source: self.source(from),
            status: Status::Ok,
            endpoint: self.wired.number,
            _slot: slot,
        });
    }

    fn source(&self, from: Address) -> Option<(Address, Arc<Peers>)> {
        self.wired.settings.source.then(|| (from, self.wired.peers.clone()))
    }

    /// Gives what waits the receives that are posted.
    fn meet_receives(&mut self) {
        while !self.waiting.is_empty() {
            let Some(receive) = lock(&self.wired.posted).receives.pop_front() else { return };
            let Some(arrived) = self.waiting.pop_front() else { return };
            let due = Instant::now() + self.wired.disorder.delay(Choice::Reply, arrived.op, 0);
            let (mut reply, mut status) = (Status::Ok, Status::Ok);
            match arrived.transfer {
                Transfer::Write { data, .. } => {
                    drop(receive.used);
                    self.event(&arrived, data, Some((receive.context, receive.slot)));
                }
                Transfer::Send { data } => {
                    if arrived.len > receive.len {
                        (reply, status) = (Status::RemoteLength, Status::LocalLength);
                    } else if arrived.len > 0
                        && !receive
                            .region
                            .is_some_and(|region| region.land(receive.address, &arrived.payload))
                    {
                        (reply, status) = (Status::RemoteLength, Status::LocalKey);
                    }
                    drop(receive.used);
                    let with_data = data.map_or(0, |_| sys::FI_REMOTE_CQ_DATA);
                    self.wired.rx.push(Entry {
                        context: Some(receive.context),
                        flags: sys::FI_MSG | sys::FI_RECV | with_data,
                        len: arrived.len,
                        data: data.unwrap_or(0).into(),
                        source: self.source(arrived.from),
                        status,
                        endpoint: self.wired.number,
                        _slot: Some(receive.slot),
                    });
                }
            }
            let (from, to, op) = (self.wired.address, arrived.from, arrived.op);
            self.push(due, op, Work::Reply { from, to, op, status: reply });
        }
    }

    /// Sleeps until something is due, arrives or is posted.
    fn sleep(&mut self) {
        let now = Instant::now();
        let wait = self
            .tasks
            .peek()
            .map_or(IDLE, |task| task.due.saturating_duration_since(now))
            .min(IDLE);
        {
            let mut posted = lock(&self.wired.posted);
            if posted.close
                || !posted.ops.is_empty()
                || !posted.receives.is_empty()
                    && (!self.waiting.is_empty() || self.wired.is_broken())
            {
                return;
            }
            posted.asleep = true;
        }
        let timeout =
            Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
        let socket = self.socket.as_fd();
        let mut fds =
            [PollFd::new(&socket, PollFlags::IN), PollFd::new(&self.wired.wake, PollFlags::IN)];
        // A signal ends it early, and that is all right.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        lock(&self.wired.posted).asleep = false;
        drain(&self.wired.wake);
    }

    /// The queue pair is destroyed: what was acknowledged lands, and peers get to know.
    fn end(&mut self) {
        for task in std::mem::take(&mut self.tasks) {
            if let Work::Land { region, id } = task.work {
                region.land_held(id);
            }
        }
        for to in self.links.keys().copied().collect::<Vec<_>>() {
            let bye = Head { from: self.wired.address, to: to.qkey, op: 0, kind: Kind::Bye };
            // Who does not get it finds out by asking.
            let _ = self.send(to, &bye.to_bytes());
        }
        let counts = &self.counts;
        log::event(
            "endpoint",
            &[
                ("qpn", self.wired.address.qpn.into()),
                ("ops", counts.ops),
                ("pieces_overtaken", counts.pieces_overtaken),
                ("events", counts.events),
                ("events_overtaken", counts.events_overtaken),
                ("held", counts.held),
                ("failed", counts.failed),
            ],
        );
    }
}

/// Returns a socket to send from.
fn outlet() -> std::io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Returns how many pieces a write has; one of nothing has one.
fn piece_count(len: usize) -> u32 {
    u32::try_from(len.div_ceil(piece_bytes(len)).max(1)).unwrap_or(u32::MAX)
}
