//! `immwire recv`: takes what senders offer, one at a time, and checks it.

use super::manifest::{Entry, Manifest, ManifestError};
use super::message::{Digest, FromReceiver, FromSender, Keep, VERSION};
use super::path::Printable;
use super::send::bar;
use super::store::{Growing, Placed, Store, StoreError, Survey};
use super::stream::{Piece, Staging, Stream, StreamError, Walk};
use super::talk::{Look, Talk, TalkError};
use crate::args::RecvArgs;
use crate::motor::{Mode, Motor, MotorError, desc_text};
use crate::report::bytes_text;
use crate::say;
use crate::transport::Peers;
use immwire::{CountError, ImmCounter, ImmTag, PeerId, Region};
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Where chunks land: 64 of 1 MiB, in pages of 64 KiB. The bound of what a push takes of memory.
pub const STAGING: Staging = Staging { slots: 64, slot_bytes: 1 << 20, page_bytes: 64 << 10 };

/// How long a receiver that is about to end waits for the sender to leave.
const LEAVE: Duration = Duration::from_secs(2);

/// How long the end of a push waits for its sender to take the reason.
const LAST_WORD: Duration = Duration::from_millis(100);

/// How often whoever waits for the disk looks up.
const LOOK: Duration = Duration::from_millis(100);

/// Why something was not received. Partial files stay, to be gone on from.
#[derive(Debug, thiserror::Error)]
pub enum RecvError {
    /// The folder.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What was offered.
    #[error("the sender's list is refused: {0}")]
    Manifest(#[from] ManifestError),
    /// Another version of the protocol.
    #[error("the sender speaks version {0} of the protocol, not {VERSION}")]
    Version(u32),
    /// The sender gave up, and says why.
    #[error("the sender stopped: {}", Printable(.0))]
    Sender(String),
    /// The sender said something else than it should.
    #[error("the sender does not keep to the protocol: {}", Printable(.0))]
    Protocol(String),
    /// The engine, the sender's silence, or Ctrl-C.
    #[error(transparent)]
    Talk(#[from] TalkError),
    /// The system has no thread to wait for the disk.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// The address could not be printed.
    #[error("cannot print the address: {0}")]
    Output(#[from] std::io::Error),
}

impl RecvError {
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

impl From<MotorError> for RecvError {
    fn from(error: MotorError) -> Self {
        TalkError::from(error).into()
    }
}

impl From<StreamError> for RecvError {
    fn from(error: StreamError) -> Self {
        Self::Protocol(error.to_string())
    }
}

/// Receives until Ctrl-C, or one push if so asked.
///
/// # Errors
///
/// [`RecvError`]: it cannot start or go on; with `--once`, also that the push was not completed.
pub fn recv(args: &RecvArgs) -> Result<(), RecvError> {
    let store = Store::open(&args.dir, args.overwrite)?;
    let carrier = args.transport.without_gpus(Peers::Come).map_err(MotorError::from)?;
    let motor = Motor::on(&carrier, args.nics, Mode::Thread)?;
    let address = motor.engine().address().to_string();
    let mut talk = Talk::new(motor, Duration::from_secs(args.patience));
    let mut out = std::io::stdout();
    writeln!(out, "{address}")?;
    out.flush()?;
    let dir = args.dir.display();
    say(format_args!("receiving into {dir}; send with: immwire push FILE... ADDR"));
    loop {
        let heard = match talk.hear::<FromSender>(Duration::from_secs(1)) {
            Err(TalkError::Motor(MotorError::Interrupted)) if !args.once => return Ok(()),
            heard => heard?,
        };
        let Some(heard) = heard else { continue };
        let mut wait = Duration::ZERO;
        let ended = match heard.message {
            Ok(FromSender::Offer { version, credit_tag, entries }) => {
                wait = LAST_WORD;
                Push::run(&store, &mut talk, heard.from, version, credit_tag, entries)
            }
            // The rest of a push that has ended here.
            Ok(FromSender::Failed { .. } | FromSender::Working | FromSender::Begin { .. }) => {
                continue;
            }
            Err(error) => Err(RecvError::Protocol(error.to_string())),
        };
        if let Err(error) = &ended {
            let told = matches!(error, RecvError::Sender(_) | RecvError::Talk(TalkError::Gone(_)));
            if !told {
                let failed = FromReceiver::Failed { reason: error.to_string() };
                talk.tell(heard.from, &failed, wait);
            }
        }
        if args.once {
            // It has the last word; leaving first could overtake it.
            let _ = talk.motor().engine().wait_peer_down(heard.from, LEAVE);
        }
        match ended {
            Err(error) if args.once => return Err(error),
            Err(error) if error.interrupted() => return Ok(()),
            Err(error) => say(format_args!("immwire: {error}")),
            Ok(()) if args.once => return Ok(()),
            Ok(()) => {}
        }
    }
}

/// Others are told while one push is under way.
fn busy() -> FromReceiver {
    FromReceiver::Failed { reason: "another push is under way here; try again later".to_owned() }
}

struct Push<'a> {
    store: &'a Store,
    talk: &'a mut Talk,
    peer: PeerId,
    credit: ImmTag,
    manifest: Manifest,
    region: Region,
    counters: Vec<ImmCounter>,
}

impl<'a> Push<'a> {
    fn run(
        store: &'a Store,
        talk: &'a mut Talk,
        peer: PeerId,
        version: u32,
        credit_tag: u32,
        entries: Vec<Entry>,
    ) -> Result<(), RecvError> {
        if version != VERSION {
            return Err(RecvError::Version(version));
        }
        let credit = ImmTag::from_bits(credit_tag);
        let credit = credit.ok_or_else(|| RecvError::Protocol("a tag that is none".to_owned()))?;
        let manifest = Manifest::new(entries)?;
        let engine = talk.motor().engine();
        let bytes = usize::try_from(STAGING.bytes()).unwrap_or(usize::MAX);
        // Of this push alone: what an earlier sender still writes goes to memory of its own.
        let region = engine.alloc(bytes).map_err(MotorError::from)?;
        let counters: Result<Vec<_>, _> = (0..STAGING.slots).map(|_| engine.counter()).collect();
        let counters = counters.map_err(MotorError::from)?;
        let mut push = Push { store, talk, peer, credit, manifest, region, counters };
        let start = Instant::now();
        let survey = push.at_work(|store, manifest, working| store.survey(manifest, working))?;
        push.talk.say(
            peer,
            &FromReceiver::Accept {
                region: desc_text(&push.region.desc()),
                staging: STAGING,
                slot_tags: push.counters.iter().map(|counter| counter.tag().bits()).collect(),
                have: survey.have.clone(),
            },
        )?;
        let keep = push.begun()?;
        let stream = Stream::new(&push.manifest, &survey.have, &keep)?;
        // Else anybody could have files of the folder dressed, and named, whose bytes they do not know.
        if let Some(Keep { file, .. }) = keep.iter().find(|keep| !survey.is_known(keep)) {
            return Err(RecvError::Protocol(format!("it keeps file {file} and does not know it")));
        }
        push.store.check_keep(&push.manifest, &survey, &keep)?;
        survey.check_room(&stream)?;
        push.store.give_back(&push.manifest, &survey, &stream)?;
        push.receive(&stream, survey, &keep)?;
        if let Err(error) = push.talk.say(peer, &FromReceiver::Done) {
            // All of it is on the disk, whether or not the sender is there to hear it.
            say(format_args!("immwire: all has arrived, and the sender was not told: {error}"));
        }
        let took = start.elapsed().as_secs_f64();
        let (files, new) = (push.manifest.files().count(), bytes_text(stream.file_bytes()));
        say(format_args!("{files} files, {new} received in {took:.2} s; all digests right"));
        Ok(())
    }

    /// Does `work` on the folder, and says from time to time that it is at it.
    fn at_work<T>(
        &mut self,
        work: impl FnOnce(&Store, &Manifest, &mut dyn FnMut(u64) -> bool) -> Result<T, StoreError>,
    ) -> Result<T, RecvError> {
        let mut stopped = None;
        let (talk, peer) = (&mut *self.talk, self.peer);
        let done = work(self.store, &self.manifest, &mut |_| {
            stopped = working(talk, peer).err();
            stopped.is_none()
        });
        match (done, stopped) {
            (_, Some(stopped)) => Err(stopped),
            (done, None) => Ok(done?),
        }
    }

    fn begun(&mut self) -> Result<Vec<Keep>, RecvError> {
        loop {
            match self.talk.hear_from(self.peer, Some(&busy()))? {
                FromSender::Begin { keep } => return Ok(keep),
                FromSender::Working => {}
                FromSender::Failed { reason } => return Err(RecvError::Sender(reason)),
                FromSender::Offer { .. } => {
                    return Err(RecvError::Protocol("a second offer".to_owned()));
                }
            }
        }
    }

    fn receive(
        &mut self,
        stream: &Stream,
        mut survey: Survey,
        keep: &[Keep],
    ) -> Result<(), RecvError> {
        let folders =
            self.at_work(|store, manifest, working| store.make_folders(manifest, working))?;
        let mut files = Vec::new();
        for (entry, _) in self.manifest.files() {
            files.push(entry.clone());
        }
        let (mut placed, mut whole) = (Placed::default(), BTreeSet::new());
        // What is kept whole needs no bytes: it gets its name, or is as it should be.
        for kept in keep.iter().filter(|kept| stream.start(kept.file).is_none()) {
            working(self.talk, self.peer)?;
            let Some(entry) = files.get(kept.file as usize) else {
                continue;
            };
            let Some(hashed) = survey.hashed.remove(&kept.file) else {
                continue;
            };
            if survey.whole.contains(&kept.file) {
                self.store.touch(entry, &hashed, &mut placed)?;
                whole.insert(kept.file);
            } else {
                let right = hashed.digest();
                let growing = self.store.grow(entry, Some(hashed))?;
                finish(growing, right, &mut placed, || working(self.talk, self.peer))?;
            }
        }
        let (store, manifest) = (self.store, &self.manifest);
        if !whole.is_empty() {
            aside(
                |stopped| {
                    store.write_out_files(manifest, &whole, |_| !stopped.load(Ordering::Relaxed))
                },
                || working(self.talk, self.peer),
            )?;
        }
        let bar = bar(stream.file_bytes(), "receiving");
        let mut writer = Writer { store: self.store, files, stream, survey, placed, growing: None };
        let mut walk = stream.walk();
        let mut chunk = vec![0; STAGING.slot_bytes as usize];
        let mut left = stream.len_bytes();
        for number in 0..stream.chunks(STAGING.slot_bytes) {
            // At most a slot's, so it fits.
            let len =
                u32::try_from(left.min(STAGING.slot_bytes.into())).unwrap_or(STAGING.slot_bytes);
            left -= u64::from(len);
            let slot = STAGING.slot(number);
            self.arrived(slot, STAGING.pages(len))?;
            // Copied before anybody looks at it: the sender could still change what lies there.
            let bytes = chunk.get_mut(..len as usize).unwrap_or_default();
            let offset = u64::from(slot) * u64::from(STAGING.slot_bytes);
            let read = self.region.read(offset, bytes);
            read.map_err(|error| RecvError::Protocol(error.to_string()))?;
            let engine = self.talk.motor().engine();
            drop(engine.submit_imm(self.peer, self.credit, 1).map_err(MotorError::from)?);
            let bytes = chunk.get(..len as usize).unwrap_or_default();
            writer.chunk(&mut walk, bytes, |written| {
                bar.inc(written);
                working(self.talk, self.peer)
            })?;
        }
        bar.finish_and_clear();
        let (store, manifest) = (self.store, &self.manifest);
        aside(
            |stopped| {
                let goes_on = |_| !stopped.load(Ordering::Relaxed);
                store.write_out_folders(manifest, &folders, goes_on)?;
                store.finish_folders(manifest, &folders, goes_on)
            },
            || working(self.talk, self.peer),
        )
    }

    /// Waits until `pages` pages lie in `slot`; the sender's failure is ours.
    fn arrived(&mut self, slot: u32, pages: u32) -> Result<(), RecvError> {
        let Some(counter) = self.counters.get(slot as usize) else {
            return Ok(());
        };
        let mut quiet = Instant::now();
        loop {
            let slice = Duration::from_millis(100);
            match self.talk.motor().count(counter, pages.into(), slice) {
                Ok(()) => return Ok(()),
                Err(MotorError::Count(CountError::Timeout { .. })) => {}
                Err(error) => return Err(error.into()),
            }
            if listen(self.talk, self.peer, Duration::from_millis(1))? {
                quiet = Instant::now();
            }
            if quiet.elapsed() > self.talk.patience() {
                // Its pages may have come while somebody else was listened to.
                return match self.talk.motor().count(counter, pages.into(), Duration::ZERO) {
                    Err(MotorError::Count(CountError::Timeout { .. })) => {
                        Err(TalkError::Silent(self.talk.patience()).into())
                    }
                    counted => Ok(counted?),
                };
            }
        }
    }
}

/// Listens to all that was said, of which the first may take `timeout`: whether the sender is heard to be at
/// work. Its failure is ours.
fn listen(talk: &mut Talk, peer: PeerId, timeout: Duration) -> Result<bool, RecvError> {
    let (start, mut timeout, mut at_work) = (Instant::now(), timeout, false);
    loop {
        match talk.look(peer, Some(&busy()), timeout)? {
            Look::Nothing => return Ok(at_work),
            Look::Other => {}
            Look::Part | Look::Message(FromSender::Working) => at_work = true,
            Look::Message(FromSender::Failed { reason }) => return Err(RecvError::Sender(reason)),
            Look::Message(_) => {
                return Err(RecvError::Protocol("an offer in the middle".to_owned()));
            }
        }
        // Somebody may talk without end.
        if start.elapsed() > LOOK {
            return Ok(at_work);
        }
        timeout = Duration::ZERO;
    }
}

/// After each file, and each piece of one: says from time to time that we are at work, and listens.
fn working(talk: &mut Talk, peer: PeerId) -> Result<(), RecvError> {
    if talk.say_sometimes(peer, &FromReceiver::Working)? {
        listen(talk, peer, Duration::ZERO)?;
    }
    Ok(())
}

/// [`Growing::finish`], [`aside`]: the file is finished, whatever stops that.
fn finish(
    growing: Growing<'_>,
    expected: Digest,
    placed: &mut Placed,
    working: impl FnMut() -> Result<(), RecvError>,
) -> Result<(), RecvError> {
    aside(|_| growing.finish(expected, placed), working)
}

/// Does `work` on a thread of its own: the disk may take longer than the sender has patience, so `working` is
/// called meanwhile. If that stops it, `work` is told by the flag, and has ended all the same before this returns.
fn aside(
    work: impl FnOnce(&AtomicBool) -> Result<(), StoreError> + Send,
    mut working: impl FnMut() -> Result<(), RecvError>,
) -> Result<(), RecvError> {
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (ends, ended) = mpsc::channel::<()>();
        let flag = &stopped;
        let work = move || {
            let done = work(flag);
            drop(ends);
            done
        };
        let thread = std::thread::Builder::new().name("immwire-finish".to_owned());
        let thread = thread.spawn_scoped(scope, work).map_err(RecvError::Thread)?;
        let mut at_work = Ok(());
        while at_work.is_ok() && ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            at_work = working();
        }
        stopped.store(at_work.is_err(), Ordering::Relaxed);
        let done = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        at_work?;
        Ok(done?)
    })
}

/// The files' side of the stream.
struct Writer<'a> {
    store: &'a Store,
    files: Vec<Entry>,
    stream: &'a Stream,
    survey: Survey,
    placed: Placed,
    growing: Option<(u32, Growing<'a>, Vec<u8>)>,
}

impl Writer<'_> {
    /// Writes the pieces of `chunk`, which `walk` has next. `working` is called after each, with how
    /// many bytes of a file it had: there may be thousands of small files in one chunk. And with 0
    /// while the disk takes its time.
    fn chunk(
        &mut self,
        walk: &mut Walk<'_>,
        chunk: &[u8],
        mut working: impl FnMut(u64) -> Result<(), RecvError>,
    ) -> Result<(), RecvError> {
        let mut rest = chunk;
        while let Some(piece) = walk.next_piece(u32::try_from(rest.len()).unwrap_or(u32::MAX)) {
            let (bytes, after) = rest.split_at_checked(piece.len() as usize).unwrap_or_default();
            self.write(piece, bytes, || working(0))?;
            working(piece.file_bytes())?;
            rest = after;
        }
        Ok(())
    }

    fn write(
        &mut self,
        piece: Piece,
        bytes: &[u8],
        working: impl FnMut() -> Result<(), RecvError>,
    ) -> Result<(), RecvError> {
        let (Piece::Bytes { file, .. } | Piece::Digest { file, .. }) = piece;
        self.open(file)?;
        let Some((_, growing, digest)) = &mut self.growing else {
            return Ok(());
        };
        if matches!(piece, Piece::Bytes { .. }) {
            growing.append(bytes)?;
            return Ok(());
        }
        digest.extend_from_slice(bytes);
        if let Ok(whole) = <[u8; 32]>::try_from(digest.as_slice())
            && let Some((_, growing, _)) = self.growing.take()
        {
            finish(growing, Digest(whole), &mut self.placed, working)?;
        }
        Ok(())
    }

    /// Opens file number `number` where the stream has it start, unless it is open.
    fn open(&mut self, number: u32) -> Result<(), RecvError> {
        if self.growing.as_ref().is_some_and(|(open, ..)| *open == number) {
            return Ok(());
        }
        let Some(entry) = self.files.get(number as usize) else {
            return Ok(());
        };
        let resumed = self.stream.start(number).is_some_and(|start| start > 0);
        let hashed = self.survey.hashed.remove(&number).filter(|_| resumed);
        self.growing = Some((number, self.store.grow(entry, hashed)?, Vec::new()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::RelPath;
    use super::super::send::{PushError, Sent, push};
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;
    use rustix::fs::{FileType, fstat};
    use std::path::Path;

    /// Pushes `bytes` as `x` into `inbox`, whose disk takes longer for each file than the sender has patience.
    fn pushed_onto_a_slow_disk(bytes: &[u8], inbox: &Path) -> Result<Sent, PushError> {
        pushed_while(bytes, inbox, |_| {})
    }

    /// The same, and from the offer on somebody else, who knows the receiver, does `meanwhile`.
    fn pushed_while(
        bytes: &[u8],
        inbox: &Path,
        meanwhile: impl FnOnce((&mut Motor, PeerId)) + Send,
    ) -> Result<Sent, PushError> {
        let outbox = tempfile::tempdir().unwrap();
        let file = outbox.path().join("x");
        std::fs::write(&file, bytes).unwrap();
        let store = Store::open(inbox, false).unwrap().with_disk(|file| {
            if FileType::from_raw_mode(fstat(file)?.st_mode) == FileType::RegularFile {
                std::thread::sleep(Duration::from_secs(4));
            }
            Ok(())
        });
        let motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let address = motor.engine().address().to_string();
        let file = file.to_str().unwrap();
        let line = ["immwire", "push", file, &address, "--patience", "3"];
        let Command::Push(args) = Cli::parse_from(line).command else { panic!("{line:?}") };
        let mut other = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let known = other.connect(motor.engine().address(), Duration::from_secs(30)).unwrap();
        let sender = std::thread::spawn(move || push(&args));
        let mut talk = Talk::new(motor, Duration::from_secs(30));
        let heard = loop {
            if let Some(heard) = talk.hear(Duration::from_secs(30)).unwrap() {
                break heard;
            }
        };
        let Ok(FromSender::Offer { version, credit_tag, entries }) = heard.message else {
            panic!("{heard:?}")
        };
        let received = std::thread::scope(|scope| {
            scope.spawn(|| meanwhile((&mut other, known)));
            Push::run(&store, &mut talk, heard.from, version, credit_tag, entries)
        });
        let sent = sender.join().unwrap();
        assert_eq!(received.is_ok(), sent.is_ok(), "{received:?} {sent:?}");
        assert_eq!(std::fs::read(inbox.join("x")).unwrap(), bytes);
        sent
    }

    #[test]
    fn a_sender_waits_for_a_disk_that_takes_longer_than_it_has_patience() {
        let dir = tempfile::tempdir().unwrap();
        let sent = pushed_onto_a_slow_disk(b"hello", dir.path()).unwrap();
        assert_eq!((sent.bytes, sent.kept), (5, 0));
    }

    /// Where a sender is, and the receiver's disk with it, whose last folder has this mode.
    static AT_THE_LAST: AtomicBool = AtomicBool::new(false);
    static HAS_LEFT: AtomicBool = AtomicBool::new(false);
    const LAST_MODE: u32 = 0o510;

    fn until(flag: &AtomicBool) {
        let start = Instant::now();
        while !flag.load(Ordering::Relaxed) {
            assert!(start.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_push_is_complete_though_its_sender_left_before_it_was_told() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap().with_disk(|file| {
            if fstat(file)?.st_mode & 0o777 == LAST_MODE {
                AT_THE_LAST.store(true, Ordering::Relaxed);
                until(&HAS_LEFT);
            }
            Ok(())
        });
        let motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let wait = Duration::from_secs(30);
        let mut sender = Motor::new(&immwire::Transport::Shm, 1, Mode::Thread).unwrap();
        let receiver = sender.connect(motor.engine().address(), wait).unwrap();
        let mut talk = Talk::new(motor, wait);
        let path = RelPath::new("d").unwrap();
        let folder = Entry { path, size: None, mode: LAST_MODE, mtime_s: 0, mtime_ns: 0 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut talk = Talk::new(sender, wait);
                let offer =
                    FromSender::Offer { version: VERSION, credit_tag: 0, entries: vec![folder] };
                talk.say(receiver, &offer).unwrap();
                let accept = talk.hear_from(receiver, None::<&()>).unwrap();
                assert!(matches!(accept, FromReceiver::Accept { .. }), "{accept:?}");
                talk.say(receiver, &FromSender::Begin { keep: Vec::new() }).unwrap();
                until(&AT_THE_LAST);
                drop(talk);
                HAS_LEFT.store(true, Ordering::Relaxed);
            });
            let heard = loop {
                if let Some(heard) = talk.hear(wait).unwrap() {
                    break heard;
                }
            };
            let Ok(FromSender::Offer { version, credit_tag, entries }) = heard.message else {
                panic!("{heard:?}")
            };
            Push::run(&store, &mut talk, heard.from, version, credit_tag, entries).unwrap();
            assert!(talk.there(heard.from).is_err(), "it has left");
        });
        assert!(dir.path().join("d").is_dir());
    }

    #[test]
    fn whoever_talks_and_never_listens_holds_no_push_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut said = 0;
        let sent = pushed_while(b"hello", dir.path(), |(motor, peer)| {
            let start = Instant::now();
            let mut taken = || motor.send(peer, b"\x07", Duration::from_millis(500)).is_ok();
            while said < 400 && start.elapsed() < Duration::from_secs(8) {
                said += usize::from(taken());
            }
        });
        assert_eq!(sent.unwrap().bytes, 5);
        // More than fit mailboxes, both ways.
        assert!(said > 264, "{said}");
    }

    #[test]
    fn and_where_all_of_a_file_was_there_already_without_its_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x.immwire-partial"), b"hello").unwrap();
        let sent = pushed_onto_a_slow_disk(b"hello", dir.path()).unwrap();
        assert_eq!((sent.bytes, sent.kept), (0, 5));
    }

    /// Whether somebody who waits for a file was heard of.
    static IS_HEARD_OF: AtomicBool = AtomicBool::new(false);

    #[test]
    fn a_file_that_is_being_finished_is_finished_whoever_stops_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap().with_disk(|_| {
            until(&IS_HEARD_OF);
            // It is still at it when nobody waits any more.
            std::thread::sleep(LOOK * 2);
            Ok(())
        });
        let path = RelPath::new("x").unwrap();
        let entry = Entry { path, size: Some(0), mode: 0o600, mtime_s: 0, mtime_ns: 0 };
        let growing = store.grow(&entry, None).unwrap();
        let right = Digest(*blake3::hash(b"").as_bytes());
        let mut calls = 0;
        let stopped = finish(growing, right, &mut Placed::default(), || {
            calls += 1;
            assert!(!dir.path().join("x").exists(), "its disk is still at it");
            IS_HEARD_OF.store(true, Ordering::Relaxed);
            Err(MotorError::Interrupted.into())
        });
        assert!(stopped.is_err_and(|error| error.interrupted()));
        assert_eq!(calls, 1);
        assert!(dir.path().join("x").exists());
    }

    #[test]
    fn whoever_waits_is_heard_of_after_each_file_of_a_chunk() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        let file = |number: u64| Entry {
            path: RelPath::new(format!("{number}")).unwrap(),
            size: Some(number % 2),
            mode: 0o600,
            mtime_s: 0,
            mtime_ns: 0,
        };
        let manifest = Manifest::new((0..8).map(file).collect()).unwrap();
        let stream = Stream::new(&manifest, &[], &[]).unwrap();
        let mut chunk = Vec::new();
        for (_, size) in manifest.files() {
            let bytes = vec![b'x'; usize::try_from(size).unwrap()];
            chunk.extend_from_slice(&bytes);
            chunk.extend_from_slice(blake3::hash(&bytes).as_bytes());
        }
        let files: Vec<_> = manifest.files().map(|(entry, _)| entry.clone()).collect();
        let writer = |survey| Writer {
            store: &store,
            files: files.clone(),
            stream: &stream,
            survey,
            placed: Placed::default(),
            growing: None,
        };
        let finished = || {
            let names = std::fs::read_dir(dir.path()).unwrap().map(|found| found.unwrap().path());
            names.filter(|path| path.extension().is_none()).count()
        };
        let (mut most, mut written) = (0, 0);
        let all = writer(Survey::default()).chunk(&mut stream.walk(), &chunk, |bytes| {
            written += bytes;
            assert!(finished() <= most + 1, "more than one file since the last call");
            most = finished();
            Ok(())
        });
        all.unwrap();
        assert_eq!((most, written), (8, 4));

        for (_, path) in files.iter().zip(std::fs::read_dir(dir.path()).unwrap()) {
            std::fs::remove_file(path.unwrap().path()).unwrap();
        }
        let stopped = writer(Survey::default()).chunk(&mut stream.walk(), &chunk, |_| {
            if finished() == 3 { Err(MotorError::Interrupted.into()) } else { Ok(()) }
        });
        assert!(stopped.is_err_and(|error| error.interrupted()));
        assert_eq!(finished(), 3);
    }
}
