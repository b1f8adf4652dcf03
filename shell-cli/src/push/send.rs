//! `immwire push`: lists files, agrees with the receiver on what is to come, streams it.

use super::manifest::{CollectError, Collected, Entry, SKIPPED, collect, shown};
use super::message::{FromReceiver, FromSender, Have, Keep, VERSION};
use super::path::Printable;
use super::store::digest;
use super::stream::{Piece, Staging, Stream, StreamError, Walk};
use super::talk::{Look, Talk, TalkError};
use crate::args::PushArgs;
use crate::motor::{Mode, Motor, MotorError, desc_of};
use crate::report::bytes_text;
use crate::say;
use crate::transport::Peers;
use immwire::{
    ImmCounter, ImmTag, MrDesc, PageIndices, PagedWrite, Pages, PeerId, Region, Transfer,
};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Why a push was not completed. What has arrived stays, to be gone on from.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// The files could not be listed.
    #[error(transparent)]
    Collect(#[from] CollectError),
    /// A file could not be read.
    #[error("cannot read {}: {source}", shown(path))]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it was when it was listed.
    #[error("{} changed while it was being sent; push it again", shown(.0))]
    Changed(PathBuf),
    /// The receiver gave up, and says why.
    #[error("the receiver stopped: {}", Printable(.0))]
    Receiver(String),
    /// The receiver said something else than it should.
    #[error("the receiver does not keep to the protocol: {}", Printable(.0))]
    Protocol(String),
    /// The engine, the receiver's silence, or Ctrl-C.
    #[error(transparent)]
    Talk(#[from] TalkError),
}

impl PushError {
    /// Whether it was Ctrl-C, and no failure.
    #[must_use]
    pub const fn interrupted(&self) -> bool {
        matches!(self, Self::Talk(TalkError::Motor(MotorError::Interrupted)))
    }

    /// What the engine said, if it was the engine.
    #[must_use]
    pub const fn motor(&self) -> Option<&MotorError> {
        if let Self::Talk(TalkError::Motor(error)) = self { Some(error) } else { None }
    }
}

impl From<MotorError> for PushError {
    fn from(error: MotorError) -> Self {
        TalkError::from(error).into()
    }
}

impl From<StreamError> for PushError {
    fn from(error: StreamError) -> Self {
        Self::Protocol(error.to_string())
    }
}

const CONNECT: Duration = Duration::from_secs(10);
const READ_BYTES: usize = 1 << 20;
/// How long a push that has failed waits for the receiver's own word.
const LAST_WORD: Duration = Duration::from_secs(2);
/// How long whoever talks without end is listened to at a time.
const LOOK: Duration = Duration::from_millis(100);

/// What was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Files in all.
    pub files: usize,
    /// Of their bytes, those that were sent now.
    pub bytes: u64,
    /// And those that were there already.
    pub kept: u64,
}

/// Sends what `args` name.
///
/// # Errors
///
/// [`PushError`]; the receiver has been told, if it is there.
pub fn push(args: &PushArgs) -> Result<Sent, PushError> {
    let found = collect(&args.paths)?;
    for path in &found.skipped {
        say(format_args!("immwire: {} {SKIPPED}", shown(path)));
    }
    let peers = Peers::At(&args.address);
    let carrier = args.transport.without_gpus(peers).map_err(MotorError::from)?;
    let motor = Motor::on(&carrier, args.nics, Mode::Thread)?;
    let mut talk = Talk::new(motor, Duration::from_secs(args.patience));
    let peer = talk.motor().connect(&args.address, CONNECT)?;
    let credit = talk.motor().engine().counter().map_err(MotorError::from)?;
    let mut push = Push { talk, peer, credit, found };
    let sent = push.run();
    if let Err(error) = &sent {
        let told = matches!(error, PushError::Receiver(_) | PushError::Talk(TalkError::Gone(_)));
        if !told {
            let _ = push.talk.say(peer, &FromSender::Failed { reason: error.to_string() });
        }
    }
    sent
}

struct Push {
    talk: Talk,
    peer: PeerId,
    credit: ImmCounter,
    found: Collected,
}

/// For each file that is gone on with, what has seen its first bytes: 2 KB each.
type Hashers = BTreeMap<u32, Box<blake3::Hasher>>;

/// What the receiver offers.
struct There {
    region: MrDesc,
    staging: Staging,
    tags: Vec<ImmTag>,
    have: Vec<Have>,
}

impl Push {
    fn run(&mut self) -> Result<Sent, PushError> {
        let offer = FromSender::Offer {
            version: VERSION,
            credit_tag: self.credit.tag().bits(),
            entries: self.found.manifest.entries().to_vec(),
        };
        self.talk.say(self.peer, &offer)?;
        let there = self.accepted()?;
        let (keep, hashers) = self.compare(&there.have)?;
        let stream = Stream::new(&self.found.manifest, &there.have, &keep)?;
        self.talk.say(self.peer, &FromSender::Begin { keep })?;
        self.stream(&there, &stream, hashers)?;
        loop {
            match self.answer()? {
                FromReceiver::Done => break,
                FromReceiver::Working => {}
                other => return Err(protocol(&other)),
            }
        }
        let bytes = stream.file_bytes();
        let files = self.found.sources.len();
        Ok(Sent { files, bytes, kept: self.found.manifest.total_bytes() - bytes })
    }

    fn answer(&mut self) -> Result<FromReceiver, PushError> {
        match self.talk.hear_from(self.peer, None::<&()>)? {
            FromReceiver::Failed { reason } => Err(PushError::Receiver(reason)),
            other => Ok(other),
        }
    }

    fn accepted(&mut self) -> Result<There, PushError> {
        loop {
            let (region, staging, slot_tags, have) = match self.answer()? {
                FromReceiver::Working => continue,
                FromReceiver::Accept { region, staging, slot_tags, have } => {
                    (region, staging, slot_tags, have)
                }
                other => return Err(protocol(&other)),
            };
            let bad = |what: &str| PushError::Protocol(what.to_owned());
            let staging = staging.check()?;
            let region = desc_of(&region).ok_or_else(|| bad("a region that is none"))?;
            let tags: Option<Vec<_>> =
                slot_tags.iter().map(|bits| ImmTag::from_bits(*bits)).collect();
            let tags = tags.filter(|tags| tags.len() == staging.slots as usize);
            let tags = tags.ok_or_else(|| bad("tags that are none"))?;
            if region.len < staging.bytes() {
                return Err(bad("a staging area smaller than its slots"));
            }
            return Ok(There { region, staging, tags, have });
        }
    }

    /// Which of what the receiver has is right: reads as much of our files, and compares digests.
    fn compare(&mut self, have: &[Have]) -> Result<(Vec<Keep>, Hashers), PushError> {
        let (mut keep, mut hashers) = (Vec::new(), Hashers::new());
        let bar = bar(claimed_bytes(have), "comparing");
        let sizes: Vec<u64> = self.found.manifest.files().map(|(_, size)| size).collect();
        for have in have {
            let size = sizes.get(have.file as usize).copied();
            let Some(size) = size.filter(|size| have.bytes <= *size) else {
                return Err(PushError::Protocol(format!(
                    "it has {} bytes of file {}",
                    have.bytes, have.file
                )));
            };
            let Some(path) = self.found.sources.get(have.file as usize).cloned() else {
                continue;
            };
            self.working()?;
            let read = |source| PushError::Read { path: path.clone(), source };
            let mut file = File::open(&path).map_err(read)?.take(have.bytes);
            let mut hasher = blake3::Hasher::new();
            let mut piece = vec![0; READ_BYTES];
            loop {
                let count = file.read(&mut piece).map_err(read)?;
                if count == 0 {
                    break;
                }
                hasher.update(piece.get(..count).unwrap_or_default());
                bar.inc(count as u64);
                self.working()?;
            }
            let ours = digest(&hasher);
            if file.limit() == 0 && ours.had() == have.digest {
                keep.push(Keep { file: have.file, bytes: have.bytes, digest: ours.kept() });
                if goes_on(have.bytes, size) {
                    hashers.insert(have.file, Box::new(hasher));
                }
            }
        }
        bar.finish_and_clear();
        Ok((keep, hashers))
    }

    fn stream(
        &mut self,
        there: &There,
        stream: &Stream,
        hashers: Hashers,
    ) -> Result<(), PushError> {
        let staging = there.staging;
        let bytes = usize::try_from(staging.bytes()).unwrap_or(usize::MAX);
        let src = self.talk.motor().engine().alloc(bytes).map_err(MotorError::from)?;
        let mut files: Vec<(Entry, PathBuf)> = Vec::new();
        for ((entry, _), path) in self.found.manifest.files().zip(&self.found.sources) {
            files.push((entry.clone(), path.clone()));
        }
        let mut reader = Reader { files, stream, hashers, open: None };
        let mut walk = stream.walk();
        let mut flying: Vec<Option<Transfer>> = (0..staging.slots).map(|_| None).collect();
        let bar = bar(stream.file_bytes(), "sending");
        let mut buffer = vec![0; staging.slot_bytes as usize];
        for chunk in 0..stream.chunks(staging.slot_bytes) {
            let slot = staging.slot(chunk);
            if chunk >= u64::from(staging.slots) {
                // What the receiver says meanwhile must not fill its mailbox here.
                self.listen(Duration::ZERO)?;
                self.credit()?;
            }
            if let Some(transfer) = flying.get_mut(slot as usize).and_then(Option::take) {
                self.finish(&transfer)?;
            }
            let filled = reader.fill(&mut walk, &mut buffer, |read| {
                bar.inc(read);
                self.working()
            })?;
            let transfer =
                self.write(there, &src, slot, buffer.get(..filled).unwrap_or_default())?;
            if let Some(place) = flying.get_mut(slot as usize) {
                *place = Some(transfer);
            }
        }
        for transfer in flying.into_iter().flatten() {
            self.finish(&transfer)?;
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Writes a chunk into its slot, page by page.
    fn write(
        &mut self,
        there: &There,
        src: &Region,
        slot: u32,
        chunk: &[u8],
    ) -> Result<Transfer, PushError> {
        let staging = there.staging;
        let first = staging.first_page(slot);
        let offset = u64::from(slot) * u64::from(staging.slot_bytes);
        // The area has been checked: every slot lies inside.
        src.write(offset, chunk).map_err(|error| PushError::Protocol(error.to_string()))?;
        let count = staging.pages(u32::try_from(chunk.len()).unwrap_or(u32::MAX));
        let indices: PageIndices = (first..first + count).collect::<Vec<_>>().into();
        let pages = Pages { indices, stride: staging.page_bytes.into(), offset: 0 };
        let write = PagedWrite {
            peer: self.peer,
            page_bytes: staging.page_bytes.into(),
            src,
            src_pages: pages.clone(),
            dst: &there.region,
            dst_pages: pages,
            imm: there.tags.get(slot as usize).copied(),
        };
        let submitted = self.talk.motor().engine().submit_paged_writes(&write);
        Ok(submitted.map_err(MotorError::from)?)
    }

    /// Waits for the transfer; one that failed because the receiver is gone, or gave up, says so.
    fn finish(&mut self, transfer: &Transfer) -> Result<(), PushError> {
        let patience = self.talk.patience();
        match self.talk.motor().finish(transfer, patience) {
            Err(MotorError::Interrupted) => Err(MotorError::Interrupted.into()),
            Err(error) => {
                // The receiver's own word, if it is on its way, says more; others may lie before it.
                let start = Instant::now();
                while start.elapsed() < LAST_WORD {
                    self.listen(LAST_WORD.saturating_sub(start.elapsed()))?;
                }
                Err(error.into())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Waits until the receiver has given a slot back.
    fn credit(&mut self) -> Result<(), PushError> {
        let mut quiet = Instant::now();
        loop {
            let slice = Duration::from_millis(100);
            match self.talk.motor().count(&self.credit, 1, slice) {
                Ok(()) => return Ok(()),
                Err(MotorError::Count(immwire::CountError::Timeout { .. })) => {}
                Err(error) => return Err(error.into()),
            }
            if self.listen(Duration::from_millis(1))? {
                quiet = Instant::now();
            }
            if quiet.elapsed() > self.talk.patience() {
                // It may have come while the receiver was listened to.
                return match self.talk.motor().count(&self.credit, 1, Duration::ZERO) {
                    Err(MotorError::Count(immwire::CountError::Timeout { .. })) => {
                        Err(TalkError::Silent(self.talk.patience()).into())
                    }
                    counted => Ok(counted?),
                };
            }
        }
    }

    /// After each file, and each piece of one: says from time to time that we are at work, and listens.
    fn working(&mut self) -> Result<(), PushError> {
        if self.talk.say_sometimes(self.peer, &FromSender::Working)? {
            self.listen(Duration::ZERO)?;
        }
        Ok(())
    }

    /// Listens to all that was said, of which the first may take `timeout`: whether the receiver is heard to
    /// be at work. Its failure is ours.
    fn listen(&mut self, timeout: Duration) -> Result<bool, PushError> {
        let (start, mut timeout, mut at_work) = (Instant::now(), timeout, false);
        loop {
            match self.talk.look(self.peer, None::<&()>, timeout)? {
                Look::Nothing => return Ok(at_work),
                Look::Other => {}
                Look::Part | Look::Message(FromReceiver::Working) => at_work = true,
                Look::Message(FromReceiver::Failed { reason }) => {
                    return Err(PushError::Receiver(reason));
                }
                Look::Message(other) => return Err(protocol(&other)),
            }
            // Somebody may talk without end.
            if start.elapsed() > LOOK {
                return Ok(at_work);
            }
            timeout = Duration::ZERO;
        }
    }
}

/// The files' side of the stream.
struct Reader<'a> {
    files: Vec<(Entry, PathBuf)>,
    stream: &'a Stream,
    hashers: Hashers,
    open: Option<Reading>,
}

struct Reading {
    number: u32,
    file: File,
    hasher: blake3::Hasher,
    digest: Option<[u8; 32]>,
}

impl Reader<'_> {
    /// Fills `chunk` with the pieces that `walk` has next, and returns how many bytes they are.
    /// `working` is called after each, with how many bytes of a file it had: there may be thousands of
    /// small files in one chunk.
    fn fill(
        &mut self,
        walk: &mut Walk<'_>,
        chunk: &mut [u8],
        mut working: impl FnMut(u64) -> Result<(), PushError>,
    ) -> Result<usize, PushError> {
        let room = chunk.len();
        let mut rest = chunk;
        while let Some(piece) = walk.next_piece(u32::try_from(rest.len()).unwrap_or(u32::MAX)) {
            let (into, after) = rest.split_at_mut_checked(piece.len() as usize).unwrap_or_default();
            self.read(piece, into)?;
            working(piece.file_bytes())?;
            rest = after;
        }
        Ok(room - rest.len())
    }

    /// The bytes of `piece`, into all of `into`. Pieces come in the order of the stream.
    fn read(&mut self, piece: Piece, into: &mut [u8]) -> Result<(), PushError> {
        match piece {
            Piece::Bytes { file, .. } => {
                let path = self.open(file)?;
                let Some(reading) = &mut self.open else {
                    return Ok(());
                };
                reading.file.read_exact(into).map_err(|source| match source.kind() {
                    std::io::ErrorKind::UnexpectedEof => PushError::Changed(path.clone()),
                    _ => PushError::Read { path: path.clone(), source },
                })?;
                reading.hasher.update(into);
            }
            Piece::Digest { file, offset, .. } => {
                let path = self.open(file)?;
                let entry = self.files.get(file as usize).map(|(entry, _)| entry);
                let Some(reading) = &mut self.open else {
                    return Ok(());
                };
                let whole = match reading.digest {
                    Some(digest) => digest,
                    None => {
                        unchanged(&reading.file, entry, &path)?;
                        *reading.digest.insert(digest(&reading.hasher).0)
                    }
                };
                let from = offset as usize;
                if let Some(part) = whole.get(from..from + into.len()) {
                    into.copy_from_slice(part);
                }
            }
        }
        Ok(())
    }

    /// Opens file number `number` where the stream has it start, unless it is open.
    fn open(&mut self, number: u32) -> Result<PathBuf, PushError> {
        let path =
            self.files.get(number as usize).map(|(_, path)| path.clone()).unwrap_or_default();
        if self.open.as_ref().is_some_and(|open| open.number == number) {
            return Ok(path);
        }
        let start = self.stream.start(number).unwrap_or(0);
        let read = |source| PushError::Read { path: path.clone(), source };
        let mut file = File::open(&path).map_err(read)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(start)).map_err(read)?;
        let hasher = match self.hashers.remove(&number) {
            Some(hasher) if start > 0 => *hasher,
            _ => blake3::Hasher::new(),
        };
        self.open = Some(Reading { number, file, hasher, digest: None });
        Ok(path)
    }
}

/// Whether a file of `size` bytes of which `kept` are there needs what has hashed those.
const fn goes_on(kept: u64, size: u64) -> bool {
    0 < kept && kept < size
}

/// A file that was written to while it was sent has a digest, but of bytes that never were a file.
fn unchanged(file: &File, entry: Option<&Entry>, path: &std::path::Path) -> Result<(), PushError> {
    let metadata =
        file.metadata().map_err(|source| PushError::Read { path: path.to_owned(), source })?;
    let same = entry.is_some_and(|entry| {
        entry.size == Some(metadata.len())
            && entry.mtime_s == metadata.mtime()
            && i64::from(entry.mtime_ns) == metadata.mtime_nsec()
    });
    if same { Ok(()) } else { Err(PushError::Changed(path.to_owned())) }
}

/// What the receiver says it has, for the bar; it may say anything.
fn claimed_bytes(have: &[Have]) -> u64 {
    have.iter().fold(0, |sum, have| sum.saturating_add(have.bytes))
}

fn protocol(message: &FromReceiver) -> PushError {
    let text = format!("{message:?}");
    PushError::Protocol(text.chars().take(200).collect())
}

/// A bar on standard error, if that is a terminal.
pub(super) fn bar(bytes: u64, what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let style = ProgressStyle::with_template(
        "{msg} [{wide_bar}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.set_message(what);
    bar
}

/// What was sent, for a person.
#[must_use]
pub fn summary(sent: Sent, took: Duration) -> String {
    let rate = sent.bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9;
    let kept = match sent.kept {
        0 => String::new(),
        kept => format!("; {} were there already", bytes_text(kept)),
    };
    format!(
        "{} files, {} sent in {:.2} s ({rate:.2} GB/s){kept}; all digests right",
        sent.files,
        bytes_text(sent.bytes),
        took.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::super::message::{Assembler, Digest, fragments};
    use super::super::recv::STAGING;
    use super::*;
    use crate::args::{Cli, Command};
    use crate::motor::desc_text;
    use clap::Parser;
    use serde::Serialize;

    const WAIT: Duration = Duration::from_secs(20);

    /// A receiver that says what its test wants.
    struct Raw {
        motor: Motor,
        sender: PeerId,
        parts: Assembler,
        counters: Vec<ImmCounter>,
    }

    impl Raw {
        fn hear(&mut self) -> FromSender {
            loop {
                let message = self.motor.message(WAIT).unwrap().expect("a message");
                if let Some(heard) = self.parts.take(&message.bytes).unwrap() {
                    return heard;
                }
            }
        }

        /// Says `message` in fragments of `bytes`, `pause` apart.
        fn say(&mut self, message: &impl Serialize, bytes: usize, pause: Duration) {
            for (number, fragment) in fragments(message, bytes).unwrap().iter().enumerate() {
                if number > 0 {
                    std::thread::sleep(pause);
                }
                self.motor.send(self.sender, fragment, WAIT).unwrap();
            }
        }

        /// Memory to write to, and the message that says so.
        fn accept(&mut self) -> (Region, FromReceiver) {
            let engine = self.motor.engine();
            let region = engine.alloc(usize::try_from(STAGING.bytes()).unwrap()).unwrap();
            self.counters = (0..STAGING.slots).map(|_| engine.counter().unwrap()).collect();
            let accept = FromReceiver::Accept {
                region: desc_text(&region.desc()),
                staging: STAGING,
                slot_tags: self.counters.iter().map(|counter| counter.tag().bits()).collect(),
                have: Vec::new(),
            };
            (region, accept)
        }
    }

    /// Pushes some bytes with `patience` seconds to a receiver that does as `receive` says after the offer.
    fn pushed(patience: &str, receive: impl FnOnce(&mut Raw) + Send) -> Result<Sent, PushError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x");
        std::fs::write(&file, b"hello").unwrap();
        let mut motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let address = motor.engine().address().to_string();
        let line = ["immwire", "push", file.to_str().unwrap(), &address, "--patience", patience];
        let Command::Push(args) = Cli::parse_from(line).command else { panic!("{line:?}") };
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| push(&args));
            let mut parts = Assembler::default();
            let sender_id = loop {
                let message = motor.message(WAIT).unwrap().expect("an offer");
                if parts.take::<FromSender>(&message.bytes).unwrap().is_some() {
                    break message.from;
                }
            };
            let counters = Vec::new();
            receive(&mut Raw { motor, sender: sender_id, parts, counters });
            sender.join().unwrap()
        })
    }

    #[test]
    fn whoever_is_in_the_middle_of_a_long_message_is_not_silent() {
        let sent = pushed("4", |raw| {
            let (region, accept) = raw.accept();
            let bytes = serde_json::to_vec(&accept).unwrap().len() / 6;
            raw.say(&accept, bytes, Duration::from_secs(1));
            assert!(matches!(raw.hear(), FromSender::Begin { .. }));
            raw.motor.count(&raw.counters[0], 1, WAIT).unwrap();
            let mut got = [0; 5];
            region.read(0, &mut got).unwrap();
            assert_eq!(&got, b"hello");
            raw.say(&FromReceiver::Done, 1 << 10, Duration::ZERO);
            assert!(raw.motor.engine().wait_peer_down(raw.sender, WAIT));
        });
        assert_eq!(sent.unwrap().bytes, 5);
    }

    #[test]
    fn the_receivers_reason_is_found_behind_what_it_said_before() {
        let sent = pushed("10", |raw| {
            let (region, accept) = raw.accept();
            // What is written to it fails.
            drop(region);
            raw.say(&accept, 1 << 15, Duration::ZERO);
            for _ in 0..3 {
                raw.say(&FromReceiver::Working, 1 << 10, Duration::ZERO);
                std::thread::sleep(Duration::from_millis(50));
            }
            let reason = "the disk is on fire".to_owned();
            raw.say(&FromReceiver::Failed { reason }, 1 << 10, Duration::ZERO);
            assert!(raw.motor.engine().wait_peer_down(raw.sender, WAIT));
        });
        let error = sent.unwrap_err();
        assert!(
            matches!(&error, PushError::Receiver(reason) if reason.contains("on fire")),
            "{error}"
        );
    }

    #[test]
    fn whoever_waits_is_heard_of_after_each_file_of_a_chunk() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..8).map(|number| dir.path().join(number.to_string())).collect();
        for (number, path) in paths.iter().enumerate() {
            std::fs::write(path, &b"x"[..number % 2]).unwrap();
        }
        let found = collect(&paths).unwrap();
        let stream = Stream::new(&found.manifest, &[], &[]).unwrap();
        let entries = found.manifest.files().map(|(entry, _)| entry.clone());
        let files: Vec<_> = entries.zip(found.sources).collect();
        let reader = || Reader {
            files: files.clone(),
            stream: &stream,
            hashers: BTreeMap::new(),
            open: None,
        };
        let mut chunk = [0; 1 << 10];
        let (mut calls, mut bytes) = (0, 0);
        let filled = reader().fill(&mut stream.walk(), &mut chunk, |read| {
            calls += 1;
            bytes += read;
            Ok(())
        });
        assert_eq!(filled.unwrap(), 4 + 8 * 32);
        assert_eq!((calls, bytes), (4 + 8, 4));
        assert_eq!(chunk[..32], *blake3::hash(b"").as_bytes());
        let mut reader = reader();
        let stopped =
            reader.fill(&mut stream.walk(), &mut chunk, |_| Err(MotorError::Interrupted.into()));
        assert!(stopped.is_err_and(|error| error.interrupted()));
        assert!(reader.open.is_some_and(|open| open.number == 0));
    }

    #[test]
    fn a_hasher_is_kept_only_where_a_file_goes_on() {
        for size in 0..4 {
            for kept in 0..=size {
                assert_eq!(goes_on(kept, size), kept != 0 && kept != size, "{kept} of {size}");
            }
        }
    }

    #[test]
    fn a_receiver_that_claims_too_much_overflows_nothing() {
        let have = |bytes| Have { file: 0, bytes, digest: Digest([0; 32]) };
        assert_eq!(claimed_bytes(&[have(3), have(4)]), 7);
        assert_eq!(claimed_bytes(&[have(u64::MAX), have(u64::MAX)]), u64::MAX);
    }
}
