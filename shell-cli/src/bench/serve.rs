//! The peer's side of a benchmark: has memory and counters, answers, checks.
//!
//! Measures nothing and trusts nothing: what a client asks for wrongly is answered with a reason.

use super::mapping;
use super::raw::{self, Ends, Memory, Raw, RawError};
use super::say::{Answer, Ask, Layout, marks, wrong};
use crate::baseline::{PingPong, Side};
use crate::motor::{Motor, MotorError, desc_of, desc_text};
use immwire::core::imm::GENERATIONS;
use immwire::{ImmCounter, ImmTag, NetAddr, PeerGroup, PeerId, Place, Region, SingleWrite};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long a client may leave a peer waiting in the middle of something.
const PATIENCE: Duration = Duration::from_secs(10);
/// A peer that polls goes to sleep when nothing was asked of it for so long.
const AWAKE: Duration = Duration::from_millis(200);

/// What a peer keeps for one client.
#[derive(Default)]
struct Client {
    /// Over the memory, so it goes first.
    raw: Option<RawEnd>,
    memory: Option<(Region, ImmCounter)>,
    barrier: Option<(PeerGroup, [ImmCounter; 2])>,
}

/// An endpoint without an engine, over a client's memory.
struct RawEnd {
    memory: Memory,
    raw: Raw,
}

/// Why a client's wish was not met.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(transparent)]
    Motor(#[from] MotorError),
    #[error("{0}")]
    Bad(&'static str),
    #[error(transparent)]
    Region(#[from] immwire::core::region::RegionError),
    #[error(transparent)]
    Mapping(#[from] mapping::MappingError),
    #[error(transparent)]
    PingPong(#[from] crate::baseline::PingPongError),
    #[error(transparent)]
    Raw(#[from] RawError),
    #[error("turn {turn} brought {found:#x}")]
    WrongTurn { turn: u64, found: u64 },
}

/// Serves whoever asks, until Ctrl-C, with memory at `place`.
///
/// # Errors
///
/// [`MotorError`]: the engine stopped.
pub fn serve(motor: &mut Motor, place: Place) -> Result<(), MotorError> {
    let mut clients: HashMap<PeerId, Client> = HashMap::new();
    let mut last = Instant::now();
    loop {
        let message = match motor.message(Duration::from_millis(20)) {
            Err(MotorError::Interrupted) => return Ok(()),
            message => message?,
        };
        // What clients had that are gone is free for the next.
        let gone = |peer: &PeerId| {
            matches!(motor.engine().peer_state(*peer), None | Some(immwire::PeerState::Down(_)))
        };
        clients.retain(|peer, _| !gone(peer));
        let Some(message) = message else {
            if motor.is_polled() && last.elapsed() > AWAKE {
                motor.rest(Duration::from_millis(20));
            }
            continue;
        };
        let client = clients.entry(message.from).or_default();
        let answer = match serde_json::from_slice(&message.bytes) {
            Ok(ask) => meet(motor, place, message.from, client, ask),
            Err(_) => Err(ServeError::Bad("not a question of this protocol")),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(ServeError::Motor(MotorError::Interrupted)) => return Ok(()),
            Err(error) => Some(Answer::Failed { reason: error.to_string() }),
        };
        if let Some(answer) = answer {
            // A client that left needs no answer.
            if let Err(error) = say(motor, message.from, &answer) {
                tracing::debug!(%error, "an answer did not arrive");
            }
        }
        last = Instant::now();
    }
}

fn say(motor: &mut Motor, to: PeerId, answer: &Answer) -> Result<(), MotorError> {
    let text = serde_json::to_vec(answer).unwrap_or_default();
    motor.send(to, &text, PATIENCE)
}

fn meet(
    motor: &mut Motor,
    place: Place,
    from: PeerId,
    client: &mut Client,
    ask: Ask,
) -> Result<Option<Answer>, ServeError> {
    match ask {
        Ask::Prepare { bytes, tag } => {
            (client.raw, client.memory) = (None, None);
            let region = motor.alloc(place, bytes)?;
            let counter = match tag {
                Some(tag) => counter_of(motor, tag)?,
                None => motor.engine().counter().map_err(MotorError::from)?,
            };
            let answer = Answer::Prepared {
                region: desc_text(&region.desc()),
                tag: counter.tag().bits(),
                // A GPU's memory is no file, whatever its addresses look like.
                place: (region.place() == Place::Host)
                    .then(|| mapping::locate(region.as_ptr().addr()).ok())
                    .flatten(),
            };
            client.memory = Some((region, counter));
            Ok(Some(answer))
        }
        Ask::Check { writes, seed, layout } => {
            let (region, counter) = client.memory.as_ref().ok_or(ServeError::Bad("no memory"))?;
            let wrong = check(motor, region, counter, writes, seed, layout)?;
            Ok(Some(Answer::Checked { wrong }))
        }
        Ask::Echo { region, tag, bytes, turns } => {
            let memory = client.memory.as_ref().ok_or(ServeError::Bad("no memory"))?;
            let back = desc_of(&region).ok_or(ServeError::Bad("not a region"))?;
            let tag = ImmTag::from_bits(tag).ok_or(ServeError::Bad("not a tag"))?;
            let bytes = Echo::new(motor, memory, bytes)?;
            say(motor, from, &Answer::Ready)?;
            bytes.run(motor, from, &back, tag, turns)?;
            Ok(None)
        }
        Ask::BareEcho { place, bytes, turns } => {
            let memory = mapping::open(place)?;
            let bytes = usize::try_from(bytes).map_err(|_| ServeError::Bad("too many bytes"))?;
            let mut pong = PingPong::new(&memory, bytes, Side::Pong)?;
            say(motor, from, &Answer::Ready)?;
            for _ in 0..turns {
                pong.pong(PATIENCE)?;
            }
            Ok(Some(Answer::Over))
        }
        Ask::Raw { endpoint } => {
            client.raw = None;
            let (region, _) = client.memory.as_ref().ok_or(ServeError::Bad("no memory"))?;
            let device = raw::device(motor.engine()).ok_or(ServeError::Bad("on no NIC here"))?;
            let mut raw = Raw::open(&device, PATIENCE)?;
            raw.meet(&endpoint)?;
            // SAFETY: the client's region stays until the endpoint over it is gone: whatever replaces or
            // drops it does so in that order. It is read and written by methods of `Region` only, between
            // calls of the endpoint's; its bytes are the peers' to write.
            let memory = unsafe { raw.register_region(region) }?;
            let far = memory.far(raw.name());
            client.raw = Some(RawEnd { memory, raw });
            Ok(Some(Answer::Raw { far }))
        }
        Ask::RawTake { writes, data } => {
            let mut end = client.raw.take().ok_or(ServeError::Bad("no endpoint"))?;
            say(motor, from, &Answer::Ready)?;
            end.raw.take(writes, data)?;
            // One that failed is of no use any more.
            client.raw = Some(end);
            Ok(Some(Answer::Over))
        }
        Ask::RawEcho { far, bytes, turns, data, done } => {
            let bytes = usize::try_from(bytes.max(8)).map_err(|_| ServeError::Bad("too long"))?;
            let region = motor.engine().alloc(bytes).map_err(MotorError::from)?;
            let mut end = client.raw.take().ok_or(ServeError::Bad("no endpoint"))?;
            let RawEnd { memory, raw } = &mut end;
            // SAFETY: the region is dropped after its registration, at the end of this block; nobody else
            // knows of it.
            let out = unsafe { raw.register_region(&region) }?;
            say(motor, from, &Answer::Ready)?;
            let ends = Ends { inbox: memory, out: &out, far: &far };
            raw.pong(&ends, turns, (data, done))?;
            drop(out);
            client.raw = Some(end);
            Ok(Some(Answer::Over))
        }
        Ask::Join { members, tags: [first, second] } => {
            client.barrier = None;
            let counters = [counter_of(motor, first)?, counter_of(motor, second)?];
            client.barrier = Some((join(motor, &members)?, counters));
            Ok(Some(Answer::Joined))
        }
        Ask::Barriers { rounds } => {
            let (group, counters) = client.barrier.as_ref().ok_or(ServeError::Bad("no barrier"))?;
            say(motor, from, &Answer::Ready)?;
            barriers(motor, group, counters, rounds)?;
            Ok(None)
        }
    }
}

/// The counter of this tag, which others are to have too: whatever of its slot's generations is next.
fn counter_of(motor: &Motor, tag: u32) -> Result<ImmCounter, ServeError> {
    let tag = ImmTag::from_bits(tag).ok_or(ServeError::Bad("not a tag"))?;
    for _ in 0..GENERATIONS {
        let counter = motor.engine().counter_at(tag.slot()).map_err(MotorError::from)?;
        if counter.tag() == tag {
            return Ok(counter);
        }
    }
    Err(ServeError::Bad("the counter is of no such generation"))
}

/// What is wrong with count or bytes; `None` if nothing is.
fn check(
    motor: &mut Motor,
    region: &Region,
    counter: &ImmCounter,
    writes: u64,
    seed: u64,
    layout: Layout,
) -> Result<Option<String>, ServeError> {
    match motor.count(counter, writes, PATIENCE) {
        Err(MotorError::Count(error)) => return Ok(Some(error.to_string())),
        counted => counted?,
    }
    Ok(match counter.available() {
        0 => wrong(region, seed, layout, || motor.step()),
        more => Some(format!("{more} writes more than were sent")),
    })
}

/// One side of a ping-pong through the engine: a message carries its turn at its [`marks`].
pub(super) struct Echo<'a> {
    region: &'a Region,
    counter: &'a ImmCounter,
    out: Region,
}

/// Why a turn was wrong.
pub(super) struct WrongTurn {
    pub(super) turn: u64,
    pub(super) found: u64,
}

impl<'a> Echo<'a> {
    pub(super) fn memory_bytes(bytes: u64) -> u64 {
        bytes.max(8)
    }

    fn new(
        motor: &Motor,
        memory: &'a (Region, ImmCounter),
        bytes: u64,
    ) -> Result<Self, ServeError> {
        let bytes = Self::memory_bytes(bytes);
        if bytes > memory.0.len() {
            return Err(ServeError::Bad("the message does not fit the memory"));
        }
        let len = usize::try_from(bytes).map_err(|_| ServeError::Bad("too many bytes"))?;
        let out = motor.engine().alloc(len).map_err(MotorError::from)?;
        Ok(Self::over(&memory.0, &memory.1, out))
    }

    /// Receives in `region` at `counter`, and sends from `out`, all of it each time.
    pub(super) fn over(region: &'a Region, counter: &'a ImmCounter, out: Region) -> Self {
        Self { region, counter, out }
    }

    /// Sends the message of `turn`.
    #[inline]
    pub(super) fn send(
        &mut self,
        motor: &mut Motor,
        peer: PeerId,
        back: &immwire::MrDesc,
        tag: ImmTag,
        turn: u64,
    ) -> Result<(), MotorError> {
        let mark = turn.to_le_bytes();
        for at in marks(self.out.len()) {
            let _ = self.out.write(at, &mark);
        }
        let write = SingleWrite {
            peer,
            src: &self.out,
            src_offset: 0,
            dst: back,
            dst_offset: 0,
            len: self.out.len(),
            imm: Some(tag),
        };
        // Its end need not be watched: the answer says that it has arrived.
        drop(motor.write(&write)?);
        Ok(())
    }

    /// Waits for the message of `turn`, `within` that time, and takes it.
    #[inline]
    pub(super) fn receive(
        &mut self,
        motor: &mut Motor,
        turn: u64,
        within: Duration,
    ) -> Result<Result<(), WrongTurn>, MotorError> {
        motor.count(self.counter, 1, within)?;
        for at in marks(self.out.len()) {
            let mut mark = [0; 8];
            let _ = self.region.read(at, &mut mark);
            let found = u64::from_le_bytes(mark);
            if found != turn {
                return Ok(Err(WrongTurn { turn, found }));
            }
        }
        Ok(Ok(()))
    }

    fn run(
        mut self,
        motor: &mut Motor,
        peer: PeerId,
        back: &immwire::MrDesc,
        tag: ImmTag,
        turns: u64,
    ) -> Result<(), ServeError> {
        for turn in 1..=turns {
            let received = self.receive(motor, turn, PATIENCE)?;
            received.map_err(|WrongTurn { turn, found }| ServeError::WrongTurn { turn, found })?;
            self.send(motor, peer, back, tag, turn)?;
        }
        Ok(())
    }
}

/// The first of the two counters of a barrier, the same at every member; those of [`Ask::Prepare`] are the first that are free.
pub(super) const BARRIER_COUNTER: u16 = 1000;

/// Knows `members` but itself.
pub(super) fn join(motor: &mut Motor, members: &[String]) -> Result<PeerGroup, MotorError> {
    let own = motor.engine().address().clone();
    let mut peers = Vec::new();
    for member in members {
        // Whose address cannot be read is not met, and the barrier misses it.
        match member.parse::<NetAddr>() {
            Ok(address) if address == own => {}
            Ok(address) => peers.push(motor.connect(&address, PATIENCE)?),
            Err(error) => tracing::warn!(%error, "a member of the barrier has no address"),
        }
    }
    Ok(motor.engine().add_peer_group(&peers))
}

/// Takes part in `rounds` barriers. A member can be at most one barrier ahead of another, so two
/// counters in turns keep them apart. Every call uses an even number of them.
pub(super) fn barriers(
    motor: &mut Motor,
    group: &PeerGroup,
    counters: &[ImmCounter; 2],
    rounds: u64,
) -> Result<(), MotorError> {
    let others = group.peers().len() as u64;
    for _ in 0..rounds.div_ceil(2) {
        for counter in counters {
            drop(motor.engine().submit_barrier(group, counter.tag())?);
            motor.count(counter, others, PATIENCE)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Case, What};
    use super::super::run::{Bench, BenchError};
    use super::*;
    use crate::motor::Mode;
    use crate::report::Row;
    use crate::transport::Carrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Measures `what` with a peer that answers some questions itself, by `answers`, and all others as a peer does.
    fn measured(
        what: What,
        answers: impl Fn(&Ask) -> Option<Vec<Answer>> + Sync,
    ) -> Result<Row, BenchError> {
        let carrier = Carrier::of(immwire::Transport::Shm);
        let [mut here, mut there] = [(); 2].map(|()| Motor::on(&carrier, 1, Mode::Thread).unwrap());
        let address = there.engine().address().clone();
        let peer = here.connect(&address, PATIENCE).unwrap();
        let over = AtomicBool::new(false);
        let measured = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut client = Client::default();
                while !over.load(Ordering::Relaxed) {
                    let slice = Duration::from_millis(20);
                    let Some(message) = there.message(slice).unwrap() else { continue };
                    let ask = serde_json::from_slice(&message.bytes).unwrap();
                    let answers = answers(&ask).unwrap_or_else(|| {
                        let met = meet(&mut there, Place::Host, message.from, &mut client, ask);
                        let failed =
                            |error: ServeError| Answer::Failed { reason: error.to_string() };
                        met.unwrap_or_else(|error| Some(failed(error))).into_iter().collect()
                    });
                    for answer in answers {
                        let _ = say(&mut there, message.from, &answer);
                    }
                }
            });
            let peers = [(peer, address.to_string())];
            let case = Case {
                what,
                bytes: 64,
                pages: None,
                depth: 1,
                peers: 1,
                mode: Mode::Thread,
                time: Duration::from_millis(50),
            };
            let mut bench = Bench {
                motor: &mut here,
                carrier: &carrier,
                peers: &peers,
                baseline: true,
                progress: &mut |_| {},
            };
            let measured = bench.run(&case);
            over.store(true, Ordering::Relaxed);
            measured
        });
        let (row, wrong) = measured?;
        assert_eq!(wrong, None);
        Ok(row)
    }

    #[test]
    fn a_peer_that_cannot_serve_the_baseline_costs_the_row_its_baseline_alone() {
        let all = measured(What::Latency, |_| None).unwrap();
        assert!(all.half_rtt_us.is_some() && all.baseline_half_rtt_us.is_some());
        // As on another host, where it opens nothing of ours.
        let row = measured(What::Latency, |ask| {
            let failed = Answer::Failed { reason: "no such file".to_owned() };
            matches!(ask, Ask::BareEcho { .. }).then(|| vec![failed])
        });
        let row = row.unwrap();
        assert!(row.half_rtt_us.is_some() && row.baseline_half_rtt_us.is_none());
        assert!(row.ratio.is_none() && row.verified);
    }

    #[test]
    fn what_a_peer_found_wrong_is_told_and_not_that_nothing_came() {
        let start = Instant::now();
        let failed = measured(What::Latency, |ask| {
            let wrong = ServeError::WrongTurn { turn: 1, found: 7 };
            let answers = [Answer::Ready, Answer::Failed { reason: wrong.to_string() }];
            matches!(ask, Ask::Echo { .. }).then(|| answers.to_vec())
        });
        assert!(
            matches!(&failed, Err(BenchError::Peer(why)) if why == "turn 1 brought 0x7"),
            "{failed:?}"
        );
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    }
}
