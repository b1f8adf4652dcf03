//! Measuring one row: rounds of ours and of the baseline in turns, in one run.
//!
//! A round is some tens of milliseconds of the same work. Before each, the source gets new bytes; after
//! each, outside of the time, the receiver checks the count and every byte. So a round that moved
//! nothing, or the bytes of an earlier one, is found out, and what disturbs the machine disturbs both
//! sides of the comparison.

use super::driver_copy::{DriverCopy, DriverCopyError};
use super::mapping::{self, FileId, MappingError, Place};
use super::plan::{Case, What};
use super::raw::{self, DEPTH_MAX, Done, Ends, Far, Memory, Piece, Raw, RawError};
use super::say::{Answer, Ask, Layout, fill, page_lists, wrong_bytes};
use super::serve::{BARRIER_COUNTER, Echo, WrongTurn, barriers, join};
use crate::baseline::{PingPong, PingPongError, Side, Slots};
use crate::motor::{Motor, MotorError, desc_of, desc_text};
use crate::report::stats::SAMPLES_MIN;
use crate::report::{Measure, Row, Shape};
use crate::shared::{SharedError, SharedMemory};
use crate::signals;
use crate::transport::Carrier;
use immwire::{
    CountError, ImmTag, MrDesc, PageIndices, PagedWrite, Pages, PeerId, Region, ScatterWrite,
    SingleWrite, SubmitError, Target, Transfer,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// Bytes that single writes go round.
const SPREAD_BYTES: u64 = 64 << 20;
/// How long a peer, or a transfer, may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a wait goes on before it looks for what else may have become of a peer, which says nothing any more if it dies.
const SLICE: Duration = Duration::from_millis(200);
/// About how long a round is.
const ROUND: Duration = Duration::from_millis(25);
/// Turns of a ping-pong that are timed together.
const BATCH: u64 = 50;

/// Why a row was not measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The engine.
    #[error(transparent)]
    Motor(#[from] MotorError),
    /// The peer said why not.
    #[error("the peer failed: {0}")]
    Peer(String),
    /// The peer did not answer.
    #[error("the peer did not answer within {0:?}")]
    Silent(Duration),
    /// The peer answered something else.
    #[error("the peer does not speak this protocol: {0}")]
    Confused(String),
    /// The baseline's memory.
    #[error("no memory for the baseline: {0}")]
    Shared(#[from] SharedError),
    /// The way to it.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The baseline's ping-pong.
    #[error(transparent)]
    PingPong(#[from] PingPongError),
    /// The baseline's endpoint.
    #[error(transparent)]
    Raw(#[from] RawError),
    /// The driver's own copies.
    #[error(transparent)]
    DriverCopy(#[from] DriverCopyError),
    /// The row needs other peers.
    #[error("{bench} needs {needed} peers, not {found}")]
    Peers {
        /// Which benchmark.
        bench: &'static str,
        /// How many it needs.
        needed: u32,
        /// How many there are.
        found: usize,
    },
}

/// What a row's measurement goes by, besides the case.
pub struct Bench<'a> {
    /// Our engine.
    pub motor: &'a mut Motor,
    /// What carries its writes.
    pub carrier: &'a Carrier,
    /// Peers, each with the address it was reached at.
    pub peers: &'a [(PeerId, String)],
    /// Whether to measure the baseline too.
    pub baseline: bool,
    /// Called with the share that is done, 0 to 1.
    pub progress: &'a mut dyn FnMut(f64),
}

impl BenchError {
    /// Whether nothing came of the other side of a baseline.
    const fn is_silence(&self) -> bool {
        matches!(
            self,
            Self::Raw(RawError::Silent(_)) | Self::PingPong(PingPongError::Silent { .. })
        )
    }

    /// Whether it is the baseline's alone: the engines, and what they say to each other, are well.
    const fn is_the_baselines(&self) -> bool {
        match self {
            Self::Peer(_)
            | Self::Shared(_)
            | Self::Mapping(_)
            | Self::PingPong(_)
            | Self::Raw(_)
            | Self::DriverCopy(DriverCopyError::Cuda(_) | DriverCopyError::Outside { .. }) => true,
            Self::Motor(_)
            | Self::Silent(_)
            | Self::Confused(_)
            | Self::DriverCopy(DriverCopyError::Motor(_))
            | Self::Peers { .. } => false,
        }
    }
}

/// Times of the rounds, in seconds for each transfer, and what was found wrong.
#[derive(Default)]
struct Samples {
    ours: Vec<f64>,
    baseline: Vec<f64>,
    /// The baseline whose writes are done early.
    early: Vec<f64>,
    /// Single turns, where the row's p99 is of those.
    single: Vec<f64>,
    wrong: Option<String>,
    /// The baseline failed.
    lost: bool,
}

impl Samples {
    /// What a round of the baseline brought. One that fails is lost to the whole row, which goes on without.
    fn of_baseline<T>(&mut self, round: Result<T, BenchError>) -> Result<Option<T>, BenchError> {
        match round {
            Ok(round) => Ok(Some(round)),
            Err(error) if error.is_the_baselines() => {
                tracing::warn!(%error, "no baseline");
                self.lost = true;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// A round's times are the row's.
    fn add(
        &mut self,
        ours: impl IntoIterator<Item = f64>,
        bare: [impl IntoIterator<Item = f64>; 2],
    ) {
        self.ours.extend(ours);
        if self.lost {
            self.baseline.clear();
            self.early.clear();
            return;
        }
        let [bare, early] = bare;
        self.baseline.extend(bare);
        self.early.extend(early);
    }
}

/// A peer's memory, and how to reach it.
struct There {
    peer: PeerId,
    desc: MrDesc,
    tag: ImmTag,
    place: Option<Place>,
}

impl Bench<'_> {
    /// Measures `case`. The second value says what was wrong with the bytes, if anything was.
    ///
    /// # Errors
    ///
    /// [`BenchError`].
    pub fn run(&mut self, case: &Case) -> Result<(Row, Option<String>), BenchError> {
        if self.peers.len() != case.peers as usize {
            let (bench, needed) = (case.what.name(), case.peers);
            return Err(BenchError::Peers { bench, needed, found: self.peers.len() });
        }
        let samples = match case.what {
            What::Write | What::Rate => self.write(case),
            What::Pages => self.pages(case),
            What::Latency => self.latency(case),
            What::Scatter => self.scatter(case),
            What::Barrier => self.barrier(case),
        }?;
        let nics = u8::try_from(self.motor.engine().nics().len()).unwrap_or(u8::MAX);
        let shape = Shape {
            bench: case.what.name(),
            provider: self.carrier.name(),
            fabric: match raw::device(self.motor.engine()) {
                Some(raw::Device::Fabric { provider, .. }) => Some(provider),
                _ => None,
            },
            nics,
            bytes: match case.what {
                What::Barrier => None,
                What::Scatter => Some(case.bytes * u64::from(case.peers)),
                _ => Some(case.bytes),
            },
            pages: case.pages.map(|(pages, _)| pages.into()),
            page_bytes: case.pages.map(|(_, bytes)| bytes),
            depth: case.depth,
        };
        let measure = match case.what {
            What::Latency | What::Barrier => Measure::Time,
            _ => Measure::Rate,
        };
        let baseline = (!samples.baseline.is_empty()).then_some(samples.baseline.as_slice());
        let verified = samples.wrong.is_none();
        let row = Row::new(shape, measure, &samples.ours, baseline, verified);
        let row = row.with_early(&samples.ours, &samples.early);
        Ok((row.with_p99_of(&samples.single), samples.wrong))
    }

    fn ask(&mut self, peer: PeerId, ask: &Ask) -> Result<(), BenchError> {
        let text = serde_json::to_vec(ask).unwrap_or_default();
        Ok(self.motor.send(peer, &text, PATIENCE)?)
    }

    fn answer(&mut self, peer: PeerId) -> Result<Answer, BenchError> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(answer) = self.said(peer, SLICE)? {
                return Ok(answer);
            }
        }
        Err(BenchError::Silent(PATIENCE))
    }

    /// What the peer says `within` that time; `None` if that is nothing, or another one said something.
    fn said(&mut self, peer: PeerId, within: Duration) -> Result<Option<Answer>, BenchError> {
        match self.motor.message(within)? {
            Some(message) if message.from == peer => match serde_json::from_slice(&message.bytes) {
                Ok(Answer::Failed { reason }) => Err(BenchError::Peer(reason)),
                Ok(answer) => Ok(Some(answer)),
                Err(error) => Err(BenchError::Confused(error.to_string())),
            },
            Some(_) => Ok(None),
            None => self.still_there(peer).map(|()| None),
        }
    }

    fn still_there(&self, peer: PeerId) -> Result<(), BenchError> {
        let gone = match self.motor.engine().peer_state(peer) {
            Some(immwire::PeerState::Down(reason)) => immwire::PeerError::Down { peer, reason },
            None => immwire::PeerError::Unknown { peer },
            Some(_) => return Ok(()),
        };
        Err(MotorError::from(gone).into())
    }

    fn ready(&mut self, peer: PeerId, ask: &Ask) -> Result<(), BenchError> {
        self.ask(peer, ask)?;
        match self.answer(peer)? {
            Answer::Ready => Ok(()),
            other => Err(confused(&other)),
        }
    }

    fn prepare(&mut self, peer: PeerId, bytes: u64) -> Result<There, BenchError> {
        self.prepare_at(peer, bytes, None)
    }

    /// With a counter of this tag, if one is named.
    fn prepare_at(
        &mut self,
        peer: PeerId,
        bytes: u64,
        tag: Option<ImmTag>,
    ) -> Result<There, BenchError> {
        self.ask(peer, &Ask::Prepare { bytes, tag: tag.map(ImmTag::bits) })?;
        match self.answer(peer)? {
            Answer::Prepared { region, tag, place } => {
                let bad = || BenchError::Confused("a region or a tag that is none".to_owned());
                let desc = desc_of(&region).ok_or_else(bad)?;
                let tag = ImmTag::from_bits(tag).ok_or_else(bad)?;
                Ok(There { peer, desc, tag, place })
            }
            other => Err(confused(&other)),
        }
    }

    fn check(
        &mut self,
        there: &There,
        writes: u64,
        seed: u64,
        layout: Layout,
    ) -> Result<Option<String>, BenchError> {
        self.ask(there.peer, &Ask::Check { writes, seed, layout })?;
        match self.answer(there.peer)? {
            Answer::Checked { wrong } => Ok(wrong),
            other => Err(confused(&other)),
        }
    }

    fn alloc(&self, bytes: u64) -> Result<Region, BenchError> {
        let place = self.carrier.gpus.map_or(immwire::Place::Host, |pair| pair.src);
        Ok(self.motor.alloc(place, bytes)?)
    }

    /// The driver's own copies of `bytes` bytes; `None` if no baseline is wanted, GPUs write nothing, or it cannot be.
    fn driver_copy(&self, bytes: u64) -> Option<DriverCopy> {
        let pair = self.carrier.copying().filter(|_| self.baseline)?;
        let copies = DriverCopy::new(self.motor, pair, bytes);
        copies.inspect_err(|error| tracing::warn!(%error, "no baseline")).ok()
    }

    /// The peer's memory without the engine; `None` if no baseline is wanted or it cannot be reached.
    fn mapped(&self, there: &There) -> Option<Mapped> {
        // What GPUs write is compared with `driver_copy`; their memory is not to be followed.
        let place = there.place.filter(|_| self.baseline && self.carrier.gpus.is_none())?;
        match mapping::open(place) {
            Ok(memory) => {
                let offset = usize::try_from(place.offset).ok()?;
                Some(Mapped { memory, file: place.file, offset })
            }
            Err(error) => {
                tracing::warn!(%error, "no baseline");
                None
            }
        }
    }

    /// An endpoint without an engine beside ours, and one at the peer, over the memory prepared there;
    /// `None` if no baseline is wanted, or there is none of this kind.
    fn raw(&mut self, there: &There, src: &Region) -> Option<Bare> {
        // Its registrations are of the host's memory.
        let wanted = self.baseline && self.carrier.gpus.is_none();
        raw::device(self.motor.engine()).filter(|_| wanted)?;
        match self.open_raw(there, src) {
            Ok(bare) => Some(bare),
            Err(error) => {
                tracing::warn!(%error, "no baseline");
                None
            }
        }
    }

    fn open_raw(&mut self, there: &There, src: &Region) -> Result<Bare, BenchError> {
        let nowhere = || BenchError::Confused("an engine that is on no NIC".to_owned());
        let device = raw::device(self.motor.engine()).ok_or_else(nowhere)?;
        let mut raw = Raw::open(&device, PATIENCE)?;
        self.ask(there.peer, &Ask::Raw { endpoint: raw.name().to_vec() })?;
        let far = match self.answer(there.peer)? {
            Answer::Raw { far } => far,
            other => return Err(confused(&other)),
        };
        raw.meet(&far.endpoint)?;
        let region = src.clone();
        // SAFETY: the clone is kept as long as the registration, and dropped after it. Nothing of ours
        // writes to it while the endpoint runs: rounds of the engine's and its rounds take turns.
        let memory = unsafe { raw.register_region(&region) }?;
        let data = there.tag.bits().into();
        Ok(Bare { memory, raw, far, data, peer: there.peer, _region: region })
    }

    /// A round of `bare`: how long `count` writes took, all as long as the first, if there is such a form. What is too
    /// long for one write is cut, as the engine cuts it. An endpoint that failed is gone: nothing is under way any more.
    fn bare_stream(
        &mut self,
        bare: &mut Option<Bare>,
        (count, depth, done): (u64, u32, Done),
        piece: impl Fn(u64) -> Piece,
    ) -> Result<Option<Duration>, BenchError> {
        let Some(Bare { raw, memory, far, data, peer, .. }) = bare else {
            return Ok(None);
        };
        if done == Done::Early && !raw.is_software() {
            return Ok(None);
        }
        let (most, how) = (raw.longest(), (*data, done));
        let parts = piece(0).len.div_ceil(most).max(1);
        let (writes, peer) = (count.saturating_mul(parts), *peer);
        self.ready(peer, &Ask::RawTake { writes, data: *data })?;
        let took = if parts == 1 {
            raw.stream(memory, far, writes, depth, how, piece)
        } else {
            let depth = depth.saturating_mul(u32::try_from(parts).unwrap_or(u32::MAX));
            let part = |number| piece(number / parts).part(number % parts, most);
            raw.stream(memory, far, writes, depth, how, part)
        };
        if took.is_err() {
            *bare = None;
        }
        self.over(peer, took.map_err(BenchError::from)).map(Some)
    }

    /// The end of a round of the baseline, on both sides: what `ours` brought. Whoever fails, the other side's part is
    /// over before something else is asked of it.
    fn over<T>(&mut self, peer: PeerId, ours: Result<T, BenchError>) -> Result<T, BenchError> {
        match (self.answer(peer), ours) {
            (Ok(Answer::Over), ours) => ours,
            (Ok(other), _) => Err(confused(&other)),
            // Of what the other side found wrong, this one sees only that nothing comes.
            (Err(BenchError::Peer(_)), Err(ours)) if !ours.is_silence() => Err(ours),
            (Err(theirs), _) => Err(theirs),
        }
    }

    /// Submits `count` transfers, at most `depth` in flight, until all have ended: how long that took.
    fn window(
        &mut self,
        depth: u32,
        count: u64,
        mut submit: impl FnMut(&mut Motor, u64) -> Result<Transfer, SubmitError>,
    ) -> Result<Duration, MotorError> {
        let depth = depth as usize;
        let mut flying: VecDeque<Transfer> = VecDeque::with_capacity(depth);
        let start = Instant::now();
        for number in 0..count {
            if flying.len() == depth
                && let Some(oldest) = flying.pop_front()
            {
                self.motor.finish(&oldest, PATIENCE)?;
            }
            flying.push_back(submit(self.motor, number).map_err(MotorError::from)?);
        }
        for transfer in flying {
            self.motor.finish(&transfer, PATIENCE)?;
        }
        Ok(start.elapsed())
    }

    /// Rounds in turns until the case's time is over. `ours` and `baseline` do so many transfers and
    /// say how long it took; `fresh` gives the source of so many the bytes of a seed; `check` finds what is
    /// wrong after so many writes of the engine's.
    fn rounds(
        &mut self,
        case: &Case,
        mut fresh: impl FnMut(&mut Motor, u64, u64),
        mut ours: impl FnMut(&mut Self, u64) -> Result<Duration, BenchError>,
        mut baseline: impl FnMut(&mut Self, u64, Done) -> Result<Option<Duration>, BenchError>,
        mut check: impl FnMut(&mut Self, u64, u64, u64) -> Result<Option<String>, BenchError>,
    ) -> Result<Samples, BenchError> {
        let mut samples = Samples::default();
        let mut seed = u64::from(std::process::id()) << 32;
        // The first round of each warms up, and says how many transfers make a round.
        let mut count = u64::from(case.depth);
        let mut counts = None;
        let start = Instant::now();
        while samples.ours.len() < SAMPLES_MIN || start.elapsed() < case.time {
            seed += 1;
            fresh(self.motor, seed, count);
            let took = ours(self, count)?;
            samples.wrong = samples.wrong.take().or(check(self, count, count, seed)?);
            let mut bare = [None; 2];
            for (took, done) in bare.iter_mut().zip([Done::Delivered, Done::Early]) {
                if samples.lost {
                    break;
                }
                seed += 1;
                fresh(self.motor, seed, count);
                let round = baseline(self, count, done);
                *took = samples.of_baseline(round)?.flatten();
                if took.is_some() {
                    // Of writes that the engine knows nothing of.
                    samples.wrong = samples.wrong.take().or(check(self, 0, count, seed)?);
                }
            }
            if counts.is_some() {
                let bare = bare.map(|took| took.map(|took| each(took, count)));
                samples.add([each(took, count)], bare);
            }
            if counts.is_none_or(|rounds: u32| rounds < 3) {
                let wanted = ROUND.as_secs_f64() / each(took, count);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "saturates"
                )]
                let wanted = wanted as u64;
                count = wanted.clamp(u64::from(case.depth), 1 << 24);
                // What was timed while the size of a round was still being found is thrown away.
                samples.ours.clear();
                samples.baseline.clear();
                samples.early.clear();
                counts = Some(counts.unwrap_or(0) + 1);
            }
            if self.is_late(case, start, &samples)? {
                break;
            }
        }
        Ok(samples)
    }

    /// After a round: shows how far it is, and whether to do with what there is. A machine that is too
    /// slow for the time given measures a little longer, not for ever.
    fn is_late(
        &mut self,
        case: &Case,
        start: Instant,
        samples: &Samples,
    ) -> Result<bool, MotorError> {
        if signals::interrupted() {
            return Err(MotorError::Interrupted);
        }
        let spent = start.elapsed();
        (self.progress)((spent.as_secs_f64() / case.time.as_secs_f64()).min(1.0));
        Ok(spent > case.time.saturating_mul(4) && !samples.ours.is_empty())
    }

    fn write(&mut self, case: &Case) -> Result<Samples, BenchError> {
        let Some((peer, _)) = self.peers.first() else {
            return Ok(Samples::default());
        };
        // Slots start on a cache line, and on a multiple of 8 for the pattern.
        let slot = case.bytes.next_multiple_of(64);
        let counted = case.what == What::Rate;
        // What moves in earnest is not in the caches: writes go round a region larger than they are.
        let spread = if counted { 0 } else { SPREAD_BYTES / slot };
        let slot_count = case.depth.max(u32::try_from(spread).unwrap_or(u32::MAX));
        let slots = u64::from(slot_count);
        let total = slot * slots;
        let there = self.prepare(*peer, total)?;
        let src = self.alloc(total)?;
        let mapped = self.mapped(&there);
        let places = mapped.as_ref().and_then(|mapped| mapped.slots(&src, slot, slot_count));
        let mut raw = self.raw(&there, &src);
        let copies = RefCell::new(self.driver_copy(total));
        let (desc, tag, to) = (there.desc, there.tag, there.peer);
        let arrivals = AtomicU64::new(0);
        let (bytes, source) = (case.bytes, src.clone());
        self.rounds(
            case,
            |motor, seed, count| fill(&source, seed, slot * slots.min(count), || motor.step()),
            |bench, count| {
                Ok(bench.window(case.depth, count, |motor, number| {
                    let offset = (number % slots) * slot;
                    motor.write(&SingleWrite {
                        peer: to,
                        src: &src,
                        src_offset: offset,
                        dst: &desc,
                        dst_offset: offset,
                        len: bytes,
                        imm: Some(tag),
                    })
                })?)
            },
            |bench, count, done| {
                if raw.is_some() {
                    return bench.bare_stream(&mut raw, (count, case.depth, done), |number| {
                        let at = (number % slots) * slot;
                        Piece { from: at, to: at, len: bytes }
                    });
                }
                if let (Some(copies), Done::Delivered) = (&mut *copies.borrow_mut(), done) {
                    let at = |number: u64| (number % slots) * slot;
                    let piece = |number| Piece { from: at(number), to: at(number), len: bytes };
                    return Ok(Some(copies.copy(&src, (0..count).map(piece))?));
                }
                let sizes = usize::try_from(count).ok().zip(usize::try_from(bytes).ok());
                let sizes = sizes.filter(|_| done == Done::Delivered);
                Ok(places.as_ref().zip(sizes).map(|(places, (count, bytes))| {
                    if counted {
                        places.copy_and_count(bytes, count, &arrivals)
                    } else {
                        places.copy(bytes, count)
                    }
                }))
            },
            |bench, writes, count, seed| {
                // A round begins at the first slot, and may end before the last.
                let written = slot_count.min(u32::try_from(count).unwrap_or(u32::MAX));
                let layout = Layout::Slots { from: 0, stride: slot, bytes, slots: written };
                if let (Some(copies), 0) = (&*copies.borrow(), writes) {
                    return Ok(wrong_bytes(&copies.arrived()?, seed, layout));
                }
                bench.check(&there, writes, seed, layout)
            },
        )
    }

    fn pages(&mut self, case: &Case) -> Result<Samples, BenchError> {
        let (Some((peer, _)), Some((pages, page_bytes))) = (self.peers.first(), case.pages) else {
            return Ok(Samples::default());
        };
        let there = self.prepare(*peer, case.bytes)?;
        let src = self.alloc(case.bytes)?;
        let mapped = self.mapped(&there);
        let slots = mapped.as_ref().and_then(|mapped| mapped.slots(&src, page_bytes, pages));
        let mut raw = self.raw(&there, &src);
        let copies = RefCell::new(self.driver_copy(case.bytes));
        let (from, to) = page_lists(pages);
        let [src_pages, dst_pages] = [&from, &to].map(|list| Pages {
            indices: PageIndices::from(list.as_slice()),
            stride: page_bytes,
            offset: 0,
        });
        let source = src.clone();
        let write = PagedWrite {
            peer: there.peer,
            page_bytes,
            src: &src,
            src_pages,
            dst: &there.desc,
            dst_pages,
            imm: Some(there.tag),
        };
        self.rounds(
            case,
            |motor, seed, _| fill(&source, seed, case.bytes, || motor.step()),
            |bench, count| {
                Ok(bench.window(case.depth, count, |motor, _| {
                    motor.engine().submit_paged_writes(&write)
                })?)
            },
            |bench, count, done| {
                if raw.is_some() {
                    let writes = count * u64::from(pages);
                    return bench.bare_stream(&mut raw, (writes, DEPTH_MAX, done), |number| {
                        // Below the number of pages, which both lists have.
                        let at = usize::try_from(number % u64::from(pages)).unwrap_or(0);
                        let offset = |list: &[u32]| {
                            list.get(at).map_or(0, |page| u64::from(*page) * page_bytes)
                        };
                        Piece { from: offset(&from), to: offset(&to), len: page_bytes }
                    });
                }
                if let (Some(copies), Done::Delivered) = (&mut *copies.borrow_mut(), done) {
                    let whole = Piece { from: 0, to: 0, len: case.bytes };
                    return Ok(Some(copies.copy(&src, (0..count).map(|_| whole))?));
                }
                let slots = slots.as_ref().filter(|_| done == Done::Delivered);
                Ok(slots.and_then(|slots| slots.copy_pages(&from, &to, count)))
            },
            |bench, writes, _, seed| {
                if let (Some(copies), 0) = (&*copies.borrow(), writes) {
                    let whole = Layout::Slots { from: 0, stride: 0, bytes: case.bytes, slots: 1 };
                    return Ok(wrong_bytes(&copies.arrived()?, seed, whole));
                }
                let layout = Layout::Shuffled { pages, page_bytes };
                bench.check(&there, writes * u64::from(pages), seed, layout)
            },
        )
    }

    fn scatter(&mut self, case: &Case) -> Result<Samples, BenchError> {
        let slot = case.bytes.next_multiple_of(64);
        // One tag for all: the first peer chooses it.
        let mut all: Vec<There> = Vec::new();
        for (peer, _) in self.peers {
            all.push(self.prepare_at(*peer, slot, all.first().map(|there| there.tag))?);
        }
        let total = slot * all.len() as u64;
        let src = self.alloc(total)?;
        let offsets = (0_u64..).map(|number| number * slot);
        let targets = all.iter().zip(offsets.clone()).map(|(there, src_offset)| Target {
            peer: there.peer,
            dst: there.desc,
            src_offset,
            dst_offset: 0,
            len: case.bytes,
        });
        let targets: Arc<[Target]> = targets.collect();
        let imm = all.first().map(|there| there.tag);
        let mapped: Vec<_> = all.iter().filter_map(|there| self.mapped(there)).collect();
        let slots: Vec<_> = mapped
            .iter()
            .zip(offsets.clone())
            .filter_map(|(mapped, from)| mapped.slots(&src.slice(from, slot).ok()?, slot, 1))
            .collect();
        let bytes = usize::try_from(case.bytes).unwrap_or(usize::MAX);
        let source = src.clone();
        self.rounds(
            case,
            |motor, seed, _| fill(&source, seed, total, || motor.step()),
            |bench, count| {
                let write = ScatterWrite { src: &src, targets: Arc::clone(&targets), imm };
                Ok(bench
                    .window(case.depth, count, |motor, _| motor.engine().submit_scatter(&write))?)
            },
            |_, count, done| {
                let whole = slots.len() == all.len() && done == Done::Delivered;
                Ok(whole.then(|| Slots::scatter(&slots, bytes, count)))
            },
            |bench, count, _, seed| {
                let mut wrong = None;
                for (there, from) in all.iter().zip(offsets.clone()) {
                    let layout = Layout::Slots { from, stride: 0, bytes: case.bytes, slots: 1 };
                    wrong = wrong.or(bench.check(there, count, seed, layout)?);
                }
                Ok(wrong)
            },
        )
    }

    fn latency(&mut self, case: &Case) -> Result<Samples, BenchError> {
        let Some((peer, _)) = self.peers.first() else {
            return Ok(Samples::default());
        };
        let bytes = Echo::memory_bytes(case.bytes);
        let there = self.prepare(*peer, bytes)?;
        let (inbox, out) = (self.alloc(bytes)?, self.alloc(bytes)?);
        let counter = self.motor.engine().counter().map_err(MotorError::from)?;
        let mut raw = self.raw(&there, &inbox);
        let raw_out = self.alloc(bytes)?;
        let mut echo = Echo::over(&inbox, &counter, out);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut samples = Samples::default();
        let (mut turns, mut warm) = (BATCH * 4, 0);
        let start = Instant::now();
        while samples.ours.len() < SAMPLES_MIN || start.elapsed() < case.time {
            // Every third round is timed turn by turn: for the p99, at the price of the clock.
            let single = warm >= 3 && warm % 3 == 0;
            let ask = Ask::Echo {
                region: desc_text(&inbox.desc()),
                tag: counter.tag().bits(),
                bytes,
                turns,
            };
            self.ready(there.peer, &ask)?;
            let round = Instant::now();
            let mut times = Vec::new();
            let mut from = Instant::now();
            for turn in 1..=turns {
                echo.send(self.motor, there.peer, &there.desc, there.tag, turn)?;
                let received = self.echoed(&mut echo, there.peer, turn)?;
                if let Err(WrongTurn { turn, found }) = received {
                    let wrong = format!("turn {turn} brought {found:#x}");
                    samples.wrong.get_or_insert(wrong);
                }
                if single || turn % BATCH == 0 {
                    let now = Instant::now();
                    let trips = if single { 1 } else { BATCH };
                    times.push(each(now - from, trips) / 2.0);
                    from = now;
                }
            }
            let took = round.elapsed();
            let mut bare = [Vec::new(), Vec::new()];
            if self.baseline && !single {
                for (times, done) in bare.iter_mut().zip([Done::Delivered, Done::Early]) {
                    if samples.lost {
                        break;
                    }
                    let round = if raw.is_some() {
                        self.bare_echo(&mut raw, &raw_out, turns, done)
                    } else if there.place.is_some() && done == Done::Delivered {
                        self.bare(there.peer, len, turns)
                    } else {
                        break;
                    };
                    *times = samples.of_baseline(round)?.unwrap_or_default();
                }
            }
            warm += 1;
            if warm < 3 {
                let wanted = (ROUND.as_secs_f64() / each(took, turns)).clamp(1.0, 1e6);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "clamped"
                )]
                let wanted = wanted as u64;
                turns = wanted.next_multiple_of(BATCH);
            } else if single {
                samples.single.append(&mut times);
            } else {
                samples.add(times, bare);
            }
            if self.is_late(case, start, &samples)? {
                break;
            }
        }
        Ok(samples)
    }

    /// Waits for the message of `turn` and takes it. A peer that has failed sends none, and says why.
    #[inline]
    fn echoed(
        &mut self,
        echo: &mut Echo<'_>,
        peer: PeerId,
        turn: u64,
    ) -> Result<Result<(), WrongTurn>, BenchError> {
        match echo.receive(self.motor, turn, SLICE) {
            Err(MotorError::Count(CountError::Timeout { .. })) => {
                self.echoed_late(echo, peer, turn)
            }
            received => Ok(received?),
        }
    }

    #[cold]
    fn echoed_late(
        &mut self,
        echo: &mut Echo<'_>,
        peer: PeerId,
        turn: u64,
    ) -> Result<Result<(), WrongTurn>, BenchError> {
        let start = Instant::now();
        loop {
            if let Some(said) = self.said(peer, Duration::ZERO)? {
                return Err(confused(&said));
            }
            match echo.receive(self.motor, turn, SLICE) {
                Err(MotorError::Count(CountError::Timeout { .. }))
                    if start.elapsed() < PATIENCE => {}
                received => return Ok(received?),
            }
        }
    }

    /// A round of the ping-pong without an engine over a NIC: seconds one way, for each batch.
    fn bare_echo(
        &mut self,
        bare: &mut Option<Bare>,
        out: &Region,
        turns: u64,
        done: Done,
    ) -> Result<Vec<f64>, BenchError> {
        let Some(Bare { raw, memory, far, data, peer, .. }) = bare else {
            return Ok(Vec::new());
        };
        if done == Done::Early && !raw.is_software() {
            return Ok(Vec::new());
        }
        let (bytes, data, peer) = (memory.len(), *data, *peer);
        // Its two marks are looked at when it has come: no part of it may come alone.
        raw.fits(bytes)?;
        // SAFETY: registered until it is dropped below, while the caller keeps the region; only the endpoint uses it.
        let out = unsafe { raw.register_region(out) }?;
        let back = memory.far(raw.name());
        self.ready(peer, &Ask::RawEcho { far: back, bytes, turns, data, done })?;
        let ends = Ends { inbox: memory, out: &out, far };
        let times = raw.ping(&ends, turns, BATCH, (data, done));
        drop(out);
        if times.is_err() {
            *bare = None;
        }
        self.over(peer, times.map_err(BenchError::from))
    }

    /// A round of the bare ping-pong, over memory of its own: seconds one way, for each batch.
    fn bare(&mut self, peer: PeerId, bytes: usize, turns: u64) -> Result<Vec<f64>, BenchError> {
        let memory = SharedMemory::create(PingPong::memory_bytes(bytes) as u64, false)?;
        let place = Place::of(&memory)?;
        let mut ping = PingPong::new(&memory, bytes, Side::Ping)?;
        self.ready(peer, &Ask::BareEcho { place, bytes: bytes as u64, turns })?;
        let mut batch = || -> Result<f64, BenchError> {
            let from = Instant::now();
            for _ in 0..BATCH {
                ping.ping(PATIENCE)?;
            }
            Ok(each(from.elapsed(), BATCH) / 2.0)
        };
        let times = (0..turns / BATCH).map(|_| batch()).collect();
        self.over(peer, times)
    }

    fn barrier(&mut self, case: &Case) -> Result<Samples, BenchError> {
        let own = self.motor.engine().address().to_string();
        let members: Vec<_> =
            self.peers.iter().map(|(_, address)| address.clone()).chain([own]).collect();
        let engine = self.motor.engine();
        let counter = |slot| engine.counter_at(slot).map_err(MotorError::from);
        let counters = [counter(BARRIER_COUNTER)?, counter(BARRIER_COUNTER + 1)?];
        let group = join(self.motor, &members)?;
        let tags = counters.each_ref().map(|counter| counter.tag().bits());
        for (peer, _) in self.peers {
            self.ask(*peer, &Ask::Join { members: members.clone(), tags })?;
            match self.answer(*peer)? {
                Answer::Joined => {}
                other => return Err(confused(&other)),
            }
        }
        let mut samples = Samples::default();
        let (mut rounds, mut warm) = (20, 0);
        let start = Instant::now();
        while samples.ours.len() < SAMPLES_MIN || start.elapsed() < case.time {
            for (peer, _) in self.peers {
                self.ready(*peer, &Ask::Barriers { rounds })?;
            }
            let mut times = Vec::new();
            for _ in 0..rounds / 2 {
                let from = Instant::now();
                barriers(self.motor, &group, &counters, 2)?;
                times.push(each(from.elapsed(), 2));
            }
            if counters.iter().any(|counter| counter.available() > 0) {
                samples.wrong = Some("more came to the barrier than there are members".to_owned());
            }
            warm += 1;
            if warm > 1 {
                // Before the last of a round, members wait for one that was told to start later.
                samples.ours.extend(times.get(1..).unwrap_or_default());
            } else {
                let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "clamped"
                )]
                let wanted = (ROUND.as_secs_f64() / mean).clamp(20.0, 1e5) as u64;
                rounds = wanted.next_multiple_of(2);
            }
            if self.is_late(case, start, &samples)? {
                break;
            }
        }
        Ok(samples)
    }
}

/// An endpoint without an engine, over memory of ours, and what it writes to.
struct Bare {
    /// Dropped first.
    memory: Memory,
    raw: Raw,
    far: Far,
    data: u64,
    peer: PeerId,
    /// What the memory is of.
    _region: Region,
}

/// The peer's memory, mapped without the engine.
struct Mapped {
    memory: SharedMemory,
    file: FileId,
    offset: usize,
}

impl Mapped {
    /// As the destination of copies from `src`; `None` if it is too small.
    fn slots(&self, src: &Region, slot_bytes: u64, slots: u32) -> Option<Slots> {
        let slots = slots as usize;
        let slot_bytes = usize::try_from(slot_bytes).ok()?;
        let total = slot_bytes.checked_mul(slots)?;
        let fits = self.offset.checked_add(total)? <= self.memory.len();
        if !fits || total as u64 > src.len() {
            return None;
        }
        let own = mapping::locate(src.as_ptr().addr());
        if own.is_ok_and(|own| own.file == self.file) {
            return None;
        }
        let dst = self.memory.as_ptr().wrapping_add(self.offset);
        // SAFETY: both ranges were checked just now. `src` and `self` live to the end of the caller,
        // which drops the slots before them, and are different files, whatever the peer said (memory of the
        // engine's is a file whose descriptor stays open), so the ranges are apart. The copies are made by
        // this thread while no transfer is in flight.
        unsafe { Slots::new(src.as_ptr(), dst, slot_bytes, slots) }
    }
}

fn confused(answer: &Answer) -> BenchError {
    BenchError::Confused(format!("{answer:?}"))
}

fn each(took: Duration, count: u64) -> f64 {
    took.as_secs_f64() / count.max(1) as f64
}
