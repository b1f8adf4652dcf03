//! The receiver's folder: where files grow, are checked, and get their names.
//!
//! A file grows as `NAME.immwire-partial` beside its place and is renamed when its BLAKE3 digest is
//! right. That partial file is all there is to resume from: whoever resumes hashes what is there and
//! asks the sender whether it is a prefix. So nothing recorded can disagree with the bytes; and what
//! was hashed is gone on from only while the file is as it was then. What the disk failed to take is removed: it can
//! still be read from memory, and whoever asks the disk again is told that all is well.
//!
//! # Invariants
//!
//! - Nothing outside the folder is touched: every folder on the way is opened relative to the last and
//!   never through a symbolic link, whatever changes meanwhile.
//! - A name appears only with bytes of the right digest behind it; an existing file with other bytes
//!   is replaced only if that was allowed.
//! - One process writes a partial file at a time: it is locked. Its owner can read and write it, whatever
//!   mode it gets with its name.
//! - A folder that we made and that has not its own mode and time yet can be told from all others.
//! - When a push is complete, all of it is on the disk: files, whether they came or were here, and every folder on the
//!   way to them, whoever made it.

use super::manifest::{Entry, Manifest};
use super::message::{Digest, Have, Keep};
use super::path::{PARTIAL_SUFFIX, Printable, RelPath};
use super::stream::Stream;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, StatVfs, Timespec,
    Timestamps,
};
use rustix::fs::{
    fchmod, flock, fstat, fstatvfs, fsync, futimens, mkdirat, openat, renameat_with, statat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why the folder could not take something. Names the path below the folder; partial files stay, to
/// resume from, but for [`StoreError::Corrupt`], and for one that the disk failed to take when all of it was there.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder itself cannot be used.
    #[error("cannot use {}: {source}", super::manifest::shown(dir))]
    Folder {
        /// Which.
        dir: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no room, by what the file system says before, or when it says so in the middle.
    #[error("disk full: {path} {}, {} are free", more(*needed), bytes(*free))]
    DiskFull {
        /// The file, or all of them.
        path: String,
        /// Bytes still to come.
        needed: u64,
        /// Bytes the file system would give.
        free: u64,
    },
    /// The file system has no place for the name, whatever room for bytes it has.
    #[error(
        "disk full: {path} needs {needed} more inodes (one for each file and folder), {free} are free"
    )]
    NoInodes {
        /// The file, or all of them.
        path: String,
        /// How many are still to come, at least.
        needed: u64,
        /// How many the file system would give.
        free: u64,
    },
    /// A file may not grow this big: a limit of the process or of the file system.
    #[error("{path} cannot grow to {}: file too large for this process or file system", bytes(*size))]
    TooLarge {
        /// Which.
        path: RelPath,
        /// Its size when whole.
        size: u64,
    },
    /// A symbolic link, or something else that is no folder, is in the way.
    #[error("{0} is not a folder here (a symbolic link is not followed)")]
    NotAFolder(String),
    /// Something that is no regular file has the name of one.
    #[error("{0} is here, and is not a regular file")]
    NotAFile(RelPath),
    /// A file with other bytes has the name.
    #[error("{0} is here with other contents; --overwrite replaces it")]
    Exists(RelPath),
    /// Another process is receiving the same file.
    #[error("{0} is being received by another process")]
    Locked(RelPath),
    /// Two names of the push are one here: it would take the other's file away.
    #[error(
        "{0} and another file of the push have one name here: letters that differ in case, or in how they are composed, are the \
         same to this file system"
    )]
    OneName(RelPath),
    /// Somebody else wrote to it, replaced it or removed it.
    #[error("{0} changed here while it was being received; push it again")]
    Changed(RelPath),
    /// The digest is wrong: what was stored is not what was read. The partial file is gone.
    #[error("{0} arrived with a wrong BLAKE3 digest and was discarded")]
    Corrupt(RelPath),
    /// Anything else.
    #[error("cannot {step} {path}: {source}")]
    Io {
        /// What was to be done.
        step: &'static str,
        /// To what.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The caller's progress function said to stop.
    #[error("interrupted")]
    Stopped,
}

fn bytes(count: u64) -> String {
    crate::report::bytes_text(count)
}

fn more(needed: u64) -> String {
    match needed {
        0 => "cannot be made".to_owned(),
        needed => format!("needs {} more", bytes(needed)),
    }
}

/// What a file system would give this user; `None` where it does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    bytes: Option<u64>,
    inodes: Option<u64>,
}

impl Room {
    /// What this user may still write in `folder`.
    fn at(folder: impl AsFd) -> Self {
        fstatvfs(folder).map_or(Self { bytes: None, inodes: None }, |stat| Self::of(&stat))
    }

    /// Some file systems count no blocks, or no inodes, and say that there are 0 in all.
    fn of(stat: &StatVfs) -> Self {
        let bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
        Self {
            bytes: (stat.f_blocks > 0).then_some(bytes),
            inodes: (stat.f_files > 0).then_some(stat.f_favail),
        }
    }

    /// What is missing for `needs` of the push.
    fn check(self, needs: Needs) -> Result<(), StoreError> {
        let path = || "the push".to_owned();
        let Needs { bytes: needed, reclaimable, files } = needs;
        match (self.bytes.map(|free| free.saturating_add(reclaimable)), self.inodes) {
            (Some(free), _) if free < needed => {
                Err(StoreError::DiskFull { path: path(), needed, free })
            }
            (_, Some(free)) if free < files => {
                Err(StoreError::NoInodes { path: path(), needed: files, free })
            }
            _ => Ok(()),
        }
    }

    /// Why there was none for what of `path` was to come.
    fn full(self, path: &RelPath, needed: u64) -> StoreError {
        let path = path.to_string();
        match (self.bytes, self.inodes) {
            (None | Some(1..), Some(0)) => StoreError::NoInodes { path, needed: 1, free: 0 },
            (free, _) => StoreError::DiskFull { path, needed, free: free.unwrap_or(0) },
        }
    }
}

/// What a push takes of one file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Needs {
    /// Bytes to be written.
    pub bytes: u64,
    /// Bytes that are given back before: of partial files that start again.
    pub reclaimable: u64,
    /// Files that are not there yet, not even in part.
    pub files: u64,
}

/// The folder that receives.
#[derive(Debug)]
pub struct Store {
    root: OwnedFd,
    overwrite: bool,
    write_out: WriteOut,
}

/// Puts a file or a folder on the disk; tests have slow disks and broken ones.
pub(super) type WriteOut = fn(BorrowedFd<'_>) -> Result<(), Errno>;

/// A folder on the way, by components.
const FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// A file whose kind is not known before it is open: must not wait for a pipe's other end.
const UNKNOWN_FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
const READ_BYTES: usize = 1 << 20;
/// What an owner needs to go on from a file.
const OWNER_MODE: u32 = 0o600;
/// Of a folder that waits for its own mode: nobody else sees what arrives there, and the sticky bit,
/// which never travels, tells whoever goes on after a kill that it was not there before.
const WAITING_FOLDER: u32 = 0o1700;

fn io(step: &'static str, path: &str) -> impl Fn(Errno) -> StoreError {
    let path = Printable(path).to_string();
    move |errno| StoreError::Io { step, path: path.clone(), source: errno.into() }
}

impl Store {
    /// Opens `dir`, and makes it if it is not there. With `overwrite`, files may be replaced.
    ///
    /// # Errors
    ///
    /// [`StoreError::Folder`].
    pub fn open(dir: &Path, overwrite: bool) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Folder { dir: dir.to_owned(), source };
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let new: Vec<_> = dir.ancestors().take_while(missing).collect();
        std::fs::create_dir_all(dir).map_err(failed)?;
        for made in new {
            write_out_name(made).map_err(|errno| failed(errno.into()))?;
        }
        // The folder itself may be reached through links: it is the user's own word.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            rustix::fs::open(dir, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        Ok(Self { root, overwrite, write_out: |file| fsync(file) })
    }

    /// The same folder on another disk.
    #[cfg(test)]
    pub(super) fn with_disk(self, write_out: WriteOut) -> Self {
        Self { write_out, ..self }
    }

    /// The folder that `path` is in, opened component by component; made if `make`.
    fn folder_of(&self, path: &RelPath, make: bool) -> Result<OwnedFd, StoreError> {
        let (folders, _) = path.split();
        self.walk(folders, path, make)
    }

    /// The last of `folders` on the way to `path`.
    fn walk<'p>(
        &self,
        folders: impl Iterator<Item = &'p str>,
        path: &RelPath,
        make: bool,
    ) -> Result<OwnedFd, StoreError> {
        let mut at = again(&self.root, path)?;
        for folder in folders {
            at = self.step_into(&at, folder, path, make.then_some(0o777))?.0;
        }
        Ok(at)
    }

    /// The last folder on the way to `path` that is there, and whether it is the one that `path` is in.
    fn deepest(&self, path: &RelPath) -> Result<(OwnedFd, bool), StoreError> {
        let mut at = again(&self.root, path)?;
        for folder in path.split().0 {
            at = match self.step_into(&at, folder, path, None) {
                Ok((next, _)) => next,
                Err(StoreError::Io { source, .. })
                    if source.kind() == std::io::ErrorKind::NotFound =>
                {
                    return Ok((at, false));
                }
                Err(error) => return Err(error),
            };
        }
        Ok((at, true))
    }

    /// Opens one folder in another, made with mode `make` if that is one and it is not there; returns
    /// whether it was made.
    fn step_into(
        &self,
        at: &OwnedFd,
        folder: &str,
        path: &RelPath,
        make: Option<u32>,
    ) -> Result<(OwnedFd, bool), StoreError> {
        let made = match make.map(|mode| mkdirat(at, folder, Mode::from_raw_mode(mode))) {
            Some(Ok(())) => true,
            None | Some(Err(Errno::EXIST)) => false,
            Some(Err(errno)) => {
                return Err(write_error(at, path, 0, 0, errno, "make a folder for"));
            }
        };
        match openat(at, folder, FOLDER, Mode::empty()) {
            Ok(next) => Ok((next, made)),
            Err(Errno::LOOP | Errno::NOTDIR) => {
                Err(StoreError::NotAFolder(Printable(folder).to_string()))
            }
            Err(errno) => Err(io(OPEN_FOLDER, path.as_str())(errno)),
        }
    }

    /// Opens a regular file for reading; `None` if there is none.
    fn open_regular(
        &self,
        at: &OwnedFd,
        name: &str,
        path: &RelPath,
    ) -> Result<Option<File>, StoreError> {
        match openat(at, name, UNKNOWN_FILE | OFlags::RDONLY, Mode::empty()) {
            Ok(file) => regular(file, path).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::LOOP | Errno::NXIO) => Err(StoreError::NotAFile(path.clone())),
            Err(errno) => Err(io("open", path.as_str())(errno)),
        }
    }

    /// What of `manifest`'s files is here, hashed: a whole file of the right size under its name, else
    /// what its partial file has; where files may be replaced, the partial file first. `working` is called
    /// for each file and for each piece read of one, and stops it by `false`.
    ///
    /// Reads all of it: as long as that takes.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: something is in the way, or a name is taken by a file of another size and may
    /// not be replaced.
    pub fn survey(
        &self,
        manifest: &Manifest,
        mut working: impl FnMut(u64) -> bool,
    ) -> Result<Survey, StoreError> {
        let mut survey = Survey::default();
        for (number, (entry, size)) in manifest.files().enumerate() {
            if !working(0) {
                return Err(StoreError::Stopped);
            }
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            let path = &entry.path;
            let (_, name) = path.split();
            let (at, is_there) = self.deepest(path)?;
            let device = fstat(&at).map_err(io("look at the folder of", path.as_str()))?.st_dev;
            survey.devices.push(device);
            if let btree_map::Entry::Vacant(place) = survey.places.entry(device) {
                place.insert(again(&at, path)?);
            }
            if !is_there {
                continue;
            }
            let mut found = self.open_regular(&at, name, path)?;
            if let Some(file) = &found
                && Stamp::of(file, path)?.size != size
            {
                if !self.overwrite {
                    return Err(StoreError::Exists(path.clone()));
                }
                found = None;
            }
            let mut whole = found.is_some();
            // What is being replaced may well have the size of what replaces it.
            if !whole || self.overwrite {
                let growing = self.open_regular(&at, &partial(name), path)?;
                if let Some(file) = &growing {
                    survey.partial.insert(number, allocated(file));
                }
                if let Some(file) = growing
                    && Stamp::of(&file, path)?.size.min(size) > 0
                {
                    (found, whole) = (Some(file), false);
                }
            }
            let Some(mut file) = found else { continue };
            if whole {
                survey.whole.insert(number);
            }
            // Before it is read: what is written meanwhile makes it another one, too.
            let stamp = Stamp::of(&file, path)?;
            let here = stamp.size.min(size);
            let hasher = hash(&mut file, here, path, &mut working)?;
            let digest = digest(&hasher);
            survey.have.push(Have { file: number, bytes: here, digest: digest.had() });
            let seen = match here < size {
                true => Seen::Start(Box::new(hasher)),
                false => Seen::All { digest, bytes: here },
            };
            survey.hashed.insert(number, Hashed { seen, stamp });
        }
        Ok(survey)
    }

    /// Checks what the sender lets us keep against the rule for existing files: one that is here whole
    /// and is not kept would be replaced.
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`].
    pub fn check_keep(
        &self,
        manifest: &Manifest,
        survey: &Survey,
        keep: &[Keep],
    ) -> Result<(), StoreError> {
        let kept: BTreeSet<u32> = keep.iter().map(|keep| keep.file).collect();
        let replaced = manifest.files().zip(0_u32..).find(|(_, number)| {
            survey.whole.contains(number) && !kept.contains(number) && !self.overwrite
        });
        match replaced {
            Some(((entry, _), _)) => Err(StoreError::Exists(entry.path.clone())),
            None => Ok(()),
        }
    }

    /// Makes `manifest`'s folders; returns the numbers of the entries that were not there before, or only
    /// since a push that was broken off. Until [`finish_folders`](Self::finish_folders) they are for
    /// their owner alone. `working` is called for each entry, and stops it by `false`.
    ///
    /// # Errors
    ///
    /// [`StoreError`].
    pub fn make_folders(
        &self,
        manifest: &Manifest,
        mut working: impl FnMut(u64) -> bool,
    ) -> Result<Vec<usize>, StoreError> {
        let mut new = Vec::new();
        for (number, entry) in manifest.entries().iter().enumerate() {
            if !working(0) {
                return Err(StoreError::Stopped);
            }
            if entry.size.is_none() {
                let at = self.folder_of(&entry.path, true)?;
                let (_, name) = entry.path.split();
                let (folder, made) =
                    self.step_into(&at, name, &entry.path, Some(WAITING_FOLDER))?;
                if made || waiting(&folder) {
                    new.push(number);
                }
            }
        }
        Ok(new)
    }

    /// Puts files on the disk that were here whole, those numbered `whole`. `working` is called for each, and stops it by
    /// `false`. Takes as long as the disk does.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: among others, one is not here any more.
    pub fn write_out_files(
        &self,
        manifest: &Manifest,
        whole: &BTreeSet<u32>,
        mut working: impl FnMut(u64) -> bool,
    ) -> Result<(), StoreError> {
        let files = manifest.files().zip(0..).filter(|(_, number)| whole.contains(number));
        for ((Entry { path, mode, .. }, _), _) in files {
            if !working(0) {
                return Err(StoreError::Stopped);
            }
            if mode & OWN_READ == 0 {
                continue; // Since it was touched nobody but root can open it. It is on the disk.
            }
            let (_, name) = path.split();
            let file = self.open_regular(&self.folder_of(path, false)?, name, path)?;
            let file = file.ok_or_else(|| StoreError::Changed(path.clone()))?;
            kept_out(self, &file).map_err(io("write out", path.as_str()))?;
        }
        Ok(())
    }

    /// Puts each folder on the disk that leads to one of `manifest`'s entries, or is one, and with it the names in it: once,
    /// and all but those numbered `new`, which [`finish_folders`](Self::finish_folders) is to do, after this. `working` is
    /// called for each, and stops it by `false`. Takes as long as the disk does.
    ///
    /// # Errors
    ///
    /// [`StoreError`].
    pub fn write_out_folders(
        &self,
        manifest: &Manifest,
        new: &[usize],
        mut working: impl FnMut(u64) -> bool,
    ) -> Result<(), StoreError> {
        let entries = manifest.entries();
        let new = new.iter().filter_map(|number| entries.get(*number));
        let new: BTreeSet<_> = new.map(|entry| entry.path.as_str()).collect();
        // By path, each with an entry that it leads to.
        let mut folders = BTreeMap::new();
        for Entry { path, size, .. } in entries {
            let text = path.as_str();
            let above = text.match_indices('/').filter_map(|(end, _)| text.get(..end));
            for folder in above.chain(size.is_none().then_some(text)) {
                if !new.contains(folder) {
                    folders.insert(folder, path);
                }
            }
        }
        written_out((self.write_out)(self.root.as_fd())).map_err(io(WRITE_FOLDER, "the push"))?;
        for (folder, path) in folders {
            if !working(0) {
                return Err(StoreError::Stopped);
            }
            self.write_out_folder(&self.walk(folder.split('/'), path, false)?, path)?;
        }
        Ok(())
    }

    fn write_out_folder(&self, folder: &OwnedFd, path: &RelPath) -> Result<(), StoreError> {
        written_out((self.write_out)(folder.as_fd())).map_err(io(WRITE_FOLDER, path.as_str()))
    }

    /// Gives the folders numbered `new` their modes and times, and puts them on the disk; last, for a folder may
    /// be read-only, and its time changes with what is made in it. `working` is called for each, and
    /// stops it by `false`.
    ///
    /// # Errors
    ///
    /// [`StoreError`].
    pub fn finish_folders(
        &self,
        manifest: &Manifest,
        new: &[usize],
        mut working: impl FnMut(u64) -> bool,
    ) -> Result<(), StoreError> {
        // Deepest first: the order of entries is a folder before what is in it.
        for number in new.iter().rev() {
            if !working(0) {
                return Err(StoreError::Stopped);
            }
            let Some(entry) = manifest.entries().get(*number) else {
                continue;
            };
            let (_, name) = entry.path.split();
            let at = self.folder_of(&entry.path, false)?;
            let (folder, _) = self.step_into(&at, name, &entry.path, None)?;
            dress(&folder, entry)?;
            self.write_out_folder(&folder, &entry.path)?;
        }
        Ok(())
    }

    /// Makes the partial files empty that start again: files before them in the stream count on what they take.
    ///
    /// # Errors
    ///
    /// As [`Store::grow`].
    pub fn give_back(
        &self,
        manifest: &Manifest,
        survey: &Survey,
        stream: &Stream,
    ) -> Result<(), StoreError> {
        for (number, (entry, _)) in (0..).zip(manifest.files()) {
            if survey.partial.contains_key(&number) && stream.start(number) == Some(0) {
                self.grow(entry, None)?;
            }
        }
        Ok(())
    }

    /// Opens the partial file of `entry` to grow: after the bytes that were `hashed`, else from 0.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: locked by another process, changed since it was hashed, in the way, or no room.
    pub fn grow(&self, entry: &Entry, hashed: Option<Hashed>) -> Result<Growing<'_>, StoreError> {
        let path = &entry.path;
        let at = self.folder_of(path, true)?;
        let (_, name) = path.split();
        let new = if hashed.is_none() { OFlags::CREATE } else { OFlags::empty() };
        let flags = UNKNOWN_FILE | OFlags::RDWR | new;
        let file = match openat(&at, partial(name), flags, Mode::from_raw_mode(OWNER_MODE)) {
            Ok(file) => regular(file, path)?,
            Err(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => {
                return Err(StoreError::NotAFile(path.clone()));
            }
            Err(Errno::NOENT) if hashed.is_some() => {
                return Err(StoreError::Changed(path.clone()));
            }
            Err(errno) => {
                return Err(write_error(&at, path, 0, entry.size.unwrap_or(0), errno, "make"));
            }
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => StoreError::Locked(path.clone()),
            errno => io("lock", path.as_str())(errno),
        })?;
        // Another receiver may have given it its name before we had the lock.
        if !leads_to(&at, &partial(name), &file) {
            return Err(StoreError::Changed(path.clone()));
        }
        let seen = match hashed {
            Some(hashed) if hashed.stamp != Stamp::of(&file, path)? => {
                return Err(StoreError::Changed(path.clone()));
            }
            Some(hashed) => hashed.seen,
            None => Seen::Start(Box::default()),
        };
        let start = seen.bytes();
        let failed = |source| StoreError::Io { step: "resume", path: path.to_string(), source };
        file.set_len(start).map_err(failed)?;
        (&file).seek(SeekFrom::Start(start)).map_err(failed)?;
        Ok(Growing { store: self, at, file, entry: entry.clone(), length: start, seen })
    }

    /// A file that was whole when it was `hashed`: gives it the mode and time of `entry`, if it has others
    /// and is ours. `placed` is the same for all files of a push.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: among others, it has changed since it was hashed.
    pub fn touch(
        &self,
        entry: &Entry,
        hashed: &Hashed,
        placed: &mut Placed,
    ) -> Result<(), StoreError> {
        let (path, stamp) = (&entry.path, hashed.stamp);
        let (_, name) = path.split();
        let at = self.folder_of(path, false)?;
        let file = self.open_regular(&at, name, path)?;
        let changed = || StoreError::Changed(path.clone());
        let file = file.ok_or_else(changed)?;
        if Stamp::of(&file, path)? != placed.touched.get(&stamp).copied().unwrap_or(stamp) {
            return Err(changed());
        }
        if entry.mode & OWN_READ == 0 {
            kept_out(self, &file).map_err(io("write out", path.as_str()))?;
        }
        // Its bytes are right, whoever owns it, and whether or not its file system may be written to.
        tolerated(clothe(&file, entry)).map_err(io(DRESS, path.as_str()))?;
        placed.touched.insert(stamp, Stamp::of(&file, path)?);
        placed.add(&fstat(&file).map_err(io("look at", path.as_str()))?);
        Ok(())
    }
}

/// What it means that the file system of `folder` refuses to write what is left of `path` after its first `done` bytes.
fn write_error(
    folder: impl AsFd,
    path: &RelPath,
    done: u64,
    size: u64,
    errno: Errno,
    step: &'static str,
) -> StoreError {
    let needed = size.saturating_sub(done);
    match errno {
        Errno::NOSPC => Room::at(folder).full(path, needed),
        Errno::DQUOT => StoreError::DiskFull { path: path.to_string(), needed, free: 0 },
        Errno::FBIG => StoreError::TooLarge { path: path.clone(), size },
        errno => io(step, path.as_str())(errno),
    }
}

/// What [`Store::survey`] found.
#[derive(Debug, Default)]
pub struct Survey {
    /// For the sender, in file order.
    pub have: Vec<Have>,
    /// Files that are here whole, under their names.
    pub whole: BTreeSet<u32>,
    /// For each of `have`, what has seen those bytes.
    pub hashed: BTreeMap<u32, Hashed>,
    /// Files that are here in part, and how many bytes of the disk each takes.
    pub partial: BTreeMap<u32, u64>,
    /// For each file, the file system that it is on, or will be.
    devices: Vec<u64>,
    /// For each of these, a folder on it.
    places: BTreeMap<u64, OwnedFd>,
}

impl Survey {
    /// Whether whoever said `keep` knows the bytes that are here.
    #[must_use]
    pub fn is_known(&self, keep: &Keep) -> bool {
        let here = self.hashed.get(&keep.file);
        here.is_some_and(|here| here.digest().kept() == keep.digest)
    }

    /// What `stream` takes of each file system beyond what is here.
    #[must_use]
    pub fn needs(&self, stream: &Stream) -> BTreeMap<u64, Needs> {
        let mut all: BTreeMap<u64, Needs> = BTreeMap::new();
        for (file, device) in (0..).zip(&self.devices) {
            let Some(start) = stream.start(file) else { continue };
            let needs = all.entry(*device).or_default();
            needs.bytes = needs.bytes.saturating_add(stream.size(file) - start);
            match self.partial.get(&file) {
                Some(taken) if start == 0 => {
                    needs.reclaimable = needs.reclaimable.saturating_add(*taken);
                }
                Some(_) => {}
                None => needs.files += 1,
            }
        }
        all
    }

    /// Checks that there is room for `stream`, on each file system that it goes to. The system may still say otherwise
    /// later.
    ///
    /// # Errors
    ///
    /// [`StoreError::DiskFull`], [`StoreError::NoInodes`].
    pub fn check_room(&self, stream: &Stream) -> Result<(), StoreError> {
        let places = self
            .needs(stream)
            .into_iter()
            .filter_map(|(device, needs)| Some((needs, Room::at(self.places.get(&device)?))));
        check_all(places)
    }
}

/// Checks each file system's room against what is needed of it: none has what another lacks.
fn check_all(places: impl IntoIterator<Item = (Needs, Room)>) -> Result<(), StoreError> {
    places.into_iter().try_for_each(|(needs, room)| room.check(needs))
}

/// What has seen a file's first bytes, and which file that was.
#[derive(Debug, Clone)]
pub struct Hashed {
    seen: Seen,
    stamp: Stamp,
}

impl Hashed {
    /// The digest of the bytes.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.seen.digest()
    }
}

/// What has seen the bytes of a file. A hasher has 2 KB, and there may be a million files.
#[derive(Debug, Clone)]
enum Seen {
    /// Those so far: it goes on.
    Start(Box<blake3::Hasher>),
    /// All that it has.
    All { digest: Digest, bytes: u64 },
}

impl Seen {
    fn digest(&self) -> Digest {
        match self {
            Self::Start(hasher) => digest(hasher),
            Self::All { digest, .. } => *digest,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Start(hasher) => hasher.count(),
            Self::All { bytes, .. } => *bytes,
        }
    }
}

/// Which file, and as of when: each write changes it, unless it comes within one tick of the file
/// system's clock of the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed_s: i64,
    changed_ns: i64,
}

impl Stamp {
    fn of(file: &File, path: &RelPath) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Io { step: "look at", path: path.to_string(), source };
        let metadata = file.metadata().map_err(failed)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            changed_s: metadata.ctime(),
            changed_ns: metadata.ctime_nsec(),
        })
    }
}

/// Which files of a push are in their places.
#[derive(Debug, Default)]
pub struct Placed {
    /// What each touch made of a file: it may have several names, and be touched under each.
    touched: BTreeMap<Stamp, Stamp>,
    /// Device and inode of those that have one name.
    only: BTreeSet<(u64, u64)>,
}

impl Placed {
    /// One that has several names is none's alone: who replaces one of them takes nothing from the others.
    fn add(&mut self, file: &Stat) {
        if file.st_nlink == 1 {
            self.only.insert((file.st_dev, file.st_ino));
        }
    }

    fn has(&self, file: &Stat) -> bool {
        self.only.contains(&(file.st_dev, file.st_ino))
    }
}

/// A file that is arriving.
#[derive(Debug)]
pub struct Growing<'a> {
    store: &'a Store,
    at: OwnedFd,
    file: File,
    entry: Entry,
    length: u64,
    seen: Seen,
}

impl Growing<'_> {
    /// Appends `bytes`.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: no room, or the disk failed. What was appended before stays.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file.write_all(bytes).map_err(|source| {
            let errno = Errno::from_io_error(&source).unwrap_or(Errno::IO);
            let size = self.entry.size.unwrap_or(0);
            write_error(&self.at, &self.entry.path, self.length, size, errno, "write")
        })?;
        // What comes after all of it makes it too long, which its end finds.
        if let Seen::Start(hasher) = &mut self.seen {
            hasher.update(bytes);
        }
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Bytes that are there.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Checks the digest and gives the file its mode, time and name. When this returns `Ok` the file is
    /// on the disk, and its name in its folder; the folder's own, when the push is complete: whoever removes the original
    /// then loses nothing to a power cut.
    /// Takes as long as the disk does: minutes, for what lies in memory of a big file.
    ///
    /// # Errors
    ///
    /// [`StoreError`]: wrong digest, or the disk failed (the partial file is removed), or the name was taken meanwhile, or
    /// is that of a file that was `placed` before.
    pub fn finish(self, expected: Digest, placed: &mut Placed) -> Result<(), StoreError> {
        let path = &self.entry.path;
        let (_, name) = path.split();
        let growing = partial(name);
        // Only names are renamed and removed, and another receiver may have made a new file under it.
        if !leads_to(&self.at, &growing, &self.file) {
            return Err(StoreError::Changed(path.clone()));
        }
        if Some(self.length) != self.entry.size || self.seen.digest() != expected {
            let _ = unlinkat(&self.at, &growing, AtFlags::empty());
            return Err(StoreError::Corrupt(path.clone()));
        }
        let write_out = || (self.store.write_out)(self.file.as_fd());
        // What others may do is right when the name appears; what the owner may not, only after that.
        let growing_mode = self.entry.mode | OWNER_MODE;
        dress(&self.file, &Entry { mode: growing_mode, ..self.entry.clone() })?;
        if let Err(errno) = write_out() {
            if may_be_lost(errno) {
                // The system tells this once: what it gave up is read from memory as if it were on the disk.
                let _ = unlinkat(&self.at, &growing, AtFlags::empty());
            }
            return Err(io("write out", path.as_str())(errno));
        }
        let rename = |flags| renameat_with(&self.at, &growing, &self.at, name, flags);
        let renamed = if self.store.overwrite {
            // The folder may fold case, or compose letters.
            if statat(&self.at, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|it| placed.has(&it)) {
                return Err(StoreError::OneName(path.clone()));
            }
            rename(RenameFlags::empty())
        } else {
            match rename(RenameFlags::NOREPLACE) {
                // Not every file system can; then what there is says whether the name is free.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    match statat(&self.at, name, AtFlags::SYMLINK_NOFOLLOW) {
                        Err(Errno::NOENT) => rename(RenameFlags::empty()),
                        Ok(_) => Err(Errno::EXIST),
                        Err(errno) => Err(errno),
                    }
                }
                renamed => renamed,
            }
        };
        renamed.map_err(|errno| match errno {
            Errno::EXIST => StoreError::Exists(path.clone()),
            errno => io("rename", path.as_str())(errno),
        })?;
        placed.add(&fstat(&self.file).map_err(io("look at", path.as_str()))?);
        if self.entry.mode != growing_mode {
            // Broken off before this, the next push finds the file whole and does it.
            dress(&self.file, &self.entry)?;
            write_out().map_err(io("write out", path.as_str()))?;
        }
        self.store.write_out_folder(&self.at, path)
    }
}

/// One more handle of `folder`, which leads to `path`.
fn again(folder: &OwnedFd, path: &RelPath) -> Result<OwnedFd, StoreError> {
    let failed = |source| StoreError::Io { step: OPEN_FOLDER, path: path.to_string(), source };
    folder.try_clone().map_err(failed)
}

fn partial(name: &str) -> String {
    format!("{name}{PARTIAL_SUFFIX}")
}

fn regular(file: OwnedFd, path: &RelPath) -> Result<File, StoreError> {
    let stat = fstat(&file).map_err(io("look at", path.as_str()))?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        Ok(File::from(file))
    } else {
        Err(StoreError::NotAFile(path.clone()))
    }
}

/// Bytes of the disk that `file` takes; 0 if it does not say.
fn allocated(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(512))
}

/// Whether `name` is that of `file`, and not of nothing or of another one.
fn leads_to(at: &OwnedFd, name: &str, file: &File) -> bool {
    let (named, open) = (statat(at, name, AtFlags::SYMLINK_NOFOLLOW), fstat(file));
    matches!((named, open), (Ok(named), Ok(open))
        if (named.st_dev, named.st_ino) == (open.st_dev, open.st_ino))
}

/// Whether `folder` is one of ours that waits for its mode. A folder may inherit the bit of its group.
fn waiting(folder: &OwnedFd) -> bool {
    fstat(folder).is_ok_and(|stat| {
        stat.st_mode & 0o5777 == WAITING_FOLDER && stat.st_uid == geteuid().as_raw()
    })
}

const OPEN_FOLDER: &str = "open the folder of";
const WRITE_FOLDER: &str = "write out a folder of";

/// The owner may read a file.
const OWN_READ: u32 = 0o400;

/// Puts a file on the disk that was here whole: from a file system that is read alone it is there.
fn kept_out(store: &Store, file: &File) -> Result<(), Errno> {
    match (store.write_out)(file.as_fd()) {
        Err(Errno::INVAL | Errno::ROFS) => Ok(()),
        done => done,
    }
}

/// Whether bytes may be lost where putting a file on the disk has ended so; not where it was broken off, or cannot be asked for.
const fn may_be_lost(errno: Errno) -> bool {
    !matches!(errno, Errno::INTR | Errno::INVAL | Errno::ROFS | Errno::NOSYS | Errno::OPNOTSUPP)
}

/// Not every file system can put a folder on the disk.
fn written_out(done: Result<(), Errno>) -> Result<(), Errno> {
    match done {
        Err(Errno::INVAL) => Ok(()),
        done => done,
    }
}

/// Puts the name of a folder on the disk that is new.
fn write_out_name(made: &Path) -> Result<(), Errno> {
    let parent = made.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty()) {
        Ok(parent) => written_out(fsync(parent)),
        // One may make something in a folder that one may not read.
        Err(Errno::ACCESS) => Ok(()),
        Err(errno) => Err(errno),
    }
}

const DRESS: &str = "set mode and time of";

/// Mode and time, as the manifest says. The mode last: a folder that has it has both.
fn dress(file: impl AsFd, entry: &Entry) -> Result<(), StoreError> {
    clothe(file, entry).map_err(io(DRESS, entry.path.as_str()))
}

/// The same; what is as it should be is not touched.
fn clothe(file: impl AsFd, entry: &Entry) -> Result<(), Errno> {
    let stat = fstat(&file)?;
    if stat.st_mtime != entry.mtime_s || u32::try_from(stat.st_mtime_nsec) != Ok(entry.mtime_ns) {
        let changed = Timespec { tv_sec: entry.mtime_s, tv_nsec: entry.mtime_ns.into() };
        futimens(&file, &Timestamps { last_access: changed, last_modification: changed })?;
    }
    if stat.st_mode & 0o7777 == entry.mode {
        return Ok(());
    }
    fchmod(&file, Mode::from_raw_mode(entry.mode))
}

/// That mode and time of a file cannot be set because it is another's, or cannot be written to, is no failure.
fn tolerated(done: Result<(), Errno>) -> Result<(), Errno> {
    match done {
        Err(Errno::PERM | Errno::ROFS) => Ok(()),
        done => done,
    }
}

/// The digest so far.
#[must_use]
pub fn digest(hasher: &blake3::Hasher) -> Digest {
    Digest(*hasher.finalize().as_bytes())
}

/// Hashes the first `count` bytes of `file`; `working` sees each piece, and stops it by `false`.
fn hash(
    file: &mut File,
    count: u64,
    path: &RelPath,
    working: &mut impl FnMut(u64) -> bool,
) -> Result<blake3::Hasher, StoreError> {
    let failed = |source| StoreError::Io { step: "read", path: path.to_string(), source };
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; READ_BYTES];
    let mut left = count;
    while left > 0 {
        let room = usize::try_from(left).unwrap_or(usize::MAX).min(READ_BYTES);
        let read = file.read(piece.get_mut(..room).unwrap_or_default()).map_err(failed)?;
        if read == 0 {
            return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
        }
        hasher.update(piece.get(..read).unwrap_or_default());
        left -= read as u64;
        if !working(read as u64) {
            return Err(StoreError::Stopped);
        }
    }
    Ok(hasher)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn entry(path: &str, size: Option<u64>) -> Entry {
        let mtime_s = 1_600_000_000;
        Entry { path: RelPath::new(path).unwrap(), size, mode: 0o640, mtime_s, mtime_ns: 5 }
    }

    fn manifest(entries: &[(&str, Option<u64>)]) -> Manifest {
        Manifest::new(entries.iter().map(|(path, size)| entry(path, *size)).collect()).unwrap()
    }

    fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    fn survey(store: &Store, manifest: &Manifest) -> Result<Survey, StoreError> {
        store.survey(manifest, |_| true)
    }

    #[test]
    fn a_file_grows_beside_its_place_and_gets_its_name_when_right() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("new/folder"), false).unwrap();
        let place = dir.path().join("new/folder/a/b");
        let mut growing = store.grow(&entry("a/b", Some(5)), None).unwrap();
        growing.append(b"he").unwrap();
        assert!(
            !place.exists()
                && fs::read(place.with_file_name("b.immwire-partial")).unwrap() == b"he"
        );
        growing.append(b"llo").unwrap();
        growing.finish(of(b"hello"), &mut Placed::default()).unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"hello");
        let metadata = fs::metadata(&place).unwrap();
        assert_eq!(
            (metadata.permissions().mode() & 0o7777, metadata.mtime()),
            (0o640, 1_600_000_000)
        );
        assert_eq!(fs::read_dir(place.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn its_owner_can_go_on_from_a_partial_file_until_it_has_its_name() {
        for owner in 0..8 {
            let dir = tempfile::tempdir().unwrap();
            let (place, growing) = (dir.path().join("x"), dir.path().join("x.immwire-partial"));
            let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
            let entry = Entry { mode: owner << 6 | 0o44, ..entry("x", Some(3)) };
            let offered = Manifest::new(vec![entry.clone()]).unwrap();
            // Broken off between its mode and its name: by a folder that cannot be replaced, and because the name is
            // taken.
            let store = Store::open(dir.path(), true).unwrap();
            let mut first = store.grow(&entry, None).unwrap();
            first.append(b"hel").unwrap();
            fs::create_dir(&place).unwrap();
            assert!(matches!(
                first.finish(of(b"hel"), &mut Placed::default()),
                Err(StoreError::Io { .. })
            ));
            assert_eq!(mode(&growing), entry.mode | 0o600);
            fs::remove_dir(&place).unwrap();
            let store = Store::open(dir.path(), false).unwrap();
            let again = || {
                let hashed = survey(&store, &offered)?.hashed[&0].clone();
                store.grow(&entry, Some(hashed))
            };
            let second = again().unwrap();
            fs::write(&place, b"theirs").unwrap();
            assert!(matches!(
                second.finish(of(b"hel"), &mut Placed::default()),
                Err(StoreError::Exists(_))
            ));
            assert_eq!(mode(&growing), entry.mode | 0o600);
            fs::remove_file(&place).unwrap();
            again().unwrap().finish(of(b"hel"), &mut Placed::default()).unwrap();
            assert_eq!(mode(&place), entry.mode);
            assert_eq!(fs::metadata(&place).unwrap().mtime(), 1_600_000_000);
            // Broken off between its name and its mode.
            fs::set_permissions(&place, fs::Permissions::from_mode(entry.mode | 0o600)).unwrap();
            let found = survey(&store, &offered).unwrap();
            assert!(found.whole.contains(&0));
            store.touch(&entry, &found.hashed[&0], &mut Placed::default()).unwrap();
            assert_eq!(mode(&place), entry.mode);
        }
    }

    /// A disk that has given pages up says so once, and they are still read as they should be.
    #[test]
    fn a_file_that_the_disk_failed_to_take_is_not_gone_on_from() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        let broken = Store::open(dir.path(), false).unwrap().with_disk(|_| Err(Errno::IO));
        let offered = manifest(&[("x", Some(3))]);
        // As it came, and as one that was there in full without its name.
        let mut growing = broken.grow(&entry("x", Some(3)), None).unwrap();
        growing.append(b"hel").unwrap();
        assert!(matches!(
            growing.finish(of(b"hel"), &mut Placed::default()),
            Err(StoreError::Io { .. })
        ));
        assert!(survey(&store, &offered).unwrap().have.is_empty());
        fs::write(dir.path().join("x.immwire-partial"), b"hel").unwrap();
        let hashed = survey(&store, &offered).unwrap().hashed.remove(&0);
        let growing = broken.grow(&entry("x", Some(3)), hashed).unwrap();
        assert!(matches!(
            growing.finish(of(b"hel"), &mut Placed::default()),
            Err(StoreError::Io { .. })
        ));
        assert!(survey(&store, &offered).unwrap().have.is_empty());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // Broken off, or on a disk that cannot be asked: nothing is lost.
        for disk in [|_: BorrowedFd<'_>| Err(Errno::INTR), |_: BorrowedFd<'_>| Err(Errno::INVAL)] {
            let broken = Store::open(dir.path(), false).unwrap().with_disk(disk);
            let hashed = survey(&store, &offered).unwrap().hashed.remove(&0);
            let mut growing = broken.grow(&entry("x", Some(3)), hashed).unwrap();
            if growing.length == 0 {
                growing.append(b"hel").unwrap();
            }
            growing.finish(of(b"hel"), &mut Placed::default()).unwrap_err();
            assert_eq!(survey(&store, &offered).unwrap().have.len(), 1);
        }
    }

    /// As where a folder folds case: there a name leads to a file that came under another.
    #[test]
    fn a_file_takes_the_place_of_no_other_of_its_push() {
        for (kept, overwrite) in [(false, true), (false, false), (true, true), (true, false)] {
            let dir = tempfile::tempdir().unwrap();
            let (first, second) = (dir.path().join("A"), dir.path().join("a"));
            let store = Store::open(dir.path(), overwrite).unwrap();
            let mut placed = Placed::default();
            if kept {
                fs::write(&first, b"hel").unwrap();
                let found = survey(&store, &manifest(&[("A", Some(3))])).unwrap();
                store.touch(&entry("A", Some(3)), &found.hashed[&0], &mut placed).unwrap();
            } else {
                let mut growing = store.grow(&entry("A", Some(3)), None).unwrap();
                growing.append(b"hel").unwrap();
                growing.finish(of(b"hel"), &mut placed).unwrap();
            }
            fs::hard_link(&first, &second).unwrap();
            let again = |placed: &mut Placed| {
                let mut growing = store.grow(&entry("a", Some(3)), None).unwrap();
                growing.append(b"HEL").unwrap();
                growing.finish(of(b"HEL"), placed)
            };
            let error = again(&mut placed).unwrap_err();
            match error {
                StoreError::OneName(path) if overwrite => assert_eq!(path.as_str(), "a"),
                StoreError::Exists(_) if !overwrite => {}
                error => panic!("{error}"),
            }
            assert_eq!(fs::read(&second).unwrap(), b"hel");
            // In another push it is replaced as any other, if that was allowed.
            assert_eq!(again(&mut Placed::default()).is_ok(), overwrite);
        }
    }

    /// Replacing one name of a file takes nothing from its others.
    #[test]
    fn a_name_of_a_file_that_has_several_is_replaced_though_another_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("x"), dir.path().join("y"));
        fs::write(&first, b"hel").unwrap();
        fs::hard_link(&first, &second).unwrap();
        let store = Store::open(dir.path(), true).unwrap();
        let found = survey(&store, &manifest(&[("x", Some(3))])).unwrap();
        let mut placed = Placed::default();
        store.touch(&entry("x", Some(3)), &found.hashed[&0], &mut placed).unwrap();
        let mut growing = store.grow(&entry("y", Some(3)), None).unwrap();
        growing.append(b"HEL").unwrap();
        growing.finish(of(b"HEL"), &mut placed).unwrap();
        assert_eq!([fs::read(&first).unwrap(), fs::read(&second).unwrap()], [b"hel", b"HEL"]);
    }

    #[test]
    fn a_wrong_digest_or_length_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        for (bytes, expected) in [(&b"hellO"[..], of(b"hello")), (b"hell", of(b"hell"))] {
            let mut growing = store.grow(&entry("x", Some(5)), None).unwrap();
            growing.append(bytes).unwrap();
            assert!(matches!(
                growing.finish(expected, &mut Placed::default()),
                Err(StoreError::Corrupt(_))
            ));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn what_is_here_is_found_hashed_and_resumed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/part.immwire-partial"), b"hel").unwrap();
        fs::write(dir.path().join("long.immwire-partial"), b"longer than it is").unwrap();
        fs::write(dir.path().join("whole"), b"whole").unwrap();
        fs::write(dir.path().join("zero"), b"").unwrap();
        let offered = manifest(&[
            ("d", None),
            ("d/part", Some(5)),
            ("e/none", Some(1)),
            ("long", Some(6)),
            ("whole", Some(5)),
            ("zero", Some(0)),
        ]);
        let found = survey(&store, &offered).unwrap();
        let have: Vec<_> =
            found.have.iter().map(|have| (have.file, have.bytes, have.digest)).collect();
        assert_eq!(
            have,
            [(0, 3, &b"hel"[..]), (2, 6, b"longer"), (3, 5, b"whole"), (4, 0, b"")]
                .map(|(file, len, bytes)| (file, len, of(bytes).had()))
        );
        assert_eq!(found.whole.iter().copied().collect::<Vec<_>>(), [3, 4]);
        let keep = |files: &[u32]| {
            let digest = Digest([0; 32]);
            files.iter().map(|file| Keep { file: *file, bytes: 0, digest }).collect::<Vec<_>>()
        };
        for (file, digest, known) in [
            (3, of(b"whole").kept(), true),
            (3, of(b"whole"), false),
            (3, of(b"whole").had(), false),
            (3, of(b"").kept(), false),
            (4, of(b"").kept(), true),
            (1, of(b"").kept(), false),
            (9, of(b"").kept(), false),
        ] {
            assert_eq!(found.is_known(&Keep { file, bytes: 0, digest }), known, "{file}");
        }
        assert!(store.check_keep(&offered, &found, &keep(&[3, 4])).is_ok());
        let refused = store.check_keep(&offered, &found, &keep(&[0, 4]));
        assert!(matches!(refused, Err(StoreError::Exists(path)) if path.as_str() == "whole"));
        let mut growing =
            store.grow(&entry("d/part", Some(5)), Some(found.hashed[&0].clone())).unwrap();
        assert_eq!(growing.length(), 3);
        growing.append(b"lo").unwrap();
        growing.finish(of(b"hello"), &mut Placed::default()).unwrap();
        assert_eq!(fs::read(dir.path().join("d/part")).unwrap(), b"hello");
        let stopped = store.survey(&offered, |_| false);
        assert!(matches!(stopped, Err(StoreError::Stopped)));
    }

    #[test]
    fn what_has_come_of_a_replacement_goes_before_what_it_replaces() {
        for (replaced, partial, overwrite, expected) in [
            (&b"theirs"[..], &b""[..], true, Some((&b"theirs"[..], true))),
            (b"theirs", b"", false, Some((b"theirs", true))),
            (b"theirs", b"our", true, Some((b"our", false))),
            (b"theirs", b"our own", true, Some((b"our ow", false))),
            (b"theirs", b"our", false, Some((b"theirs", true))),
            (b"old", b"our", true, Some((b"our", false))),
            (b"old", b"", true, None),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open(dir.path(), overwrite).unwrap();
            fs::write(dir.path().join("x"), replaced).unwrap();
            fs::write(dir.path().join("x.immwire-partial"), partial).unwrap();
            let found = survey(&store, &manifest(&[("x", Some(6))])).unwrap();
            let have = found.have.first().map(|have| (have.bytes, have.digest));
            let expected_have = expected.map(|(bytes, _)| (bytes.len() as u64, of(bytes).had()));
            assert_eq!(have, expected_have, "{replaced:?} {partial:?} {overwrite}");
            let whole = expected.is_some_and(|(_, whole)| whole);
            assert_eq!(found.whole.contains(&0), whole, "{replaced:?} {partial:?} {overwrite}");
        }
    }

    /// Writes `bytes` to `path`, until its time says so: clocks of file systems may be slow.
    fn rewrite(path: &Path, bytes: &[u8]) {
        let time = || fs::metadata(path).map(|found| (found.ctime(), found.ctime_nsec())).unwrap();
        let before = time();
        while time() == before {
            fs::write(path, bytes).unwrap();
        }
    }

    type Meddle = fn(&Path);
    const MEDDLES: [(&str, Meddle); 5] = [
        ("removed", |path| fs::remove_file(path).unwrap()),
        ("shortened", |path| rewrite(path, b"h")),
        ("emptied", |path| rewrite(path, b"")),
        ("rewritten", |path| rewrite(path, b"HEL")),
        ("replaced", |path| {
            fs::write(path.with_extension("new"), b"hel").unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        }),
    ];

    #[test]
    fn a_partial_file_that_has_changed_since_it_was_hashed_is_not_gone_on_from() {
        for (what, meddle) in MEDDLES {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open(dir.path(), false).unwrap();
            let (place, growing) = (dir.path().join("x"), dir.path().join("x.immwire-partial"));
            fs::write(&growing, b"hel").unwrap();
            // The first is gone on with; the second is kept whole, and only gets its name.
            for size in [5, 3] {
                let offered = manifest(&[("x", Some(size))]);
                let mut found = survey(&store, &offered).unwrap();
                let (entry, hashed) = (entry("x", Some(size)), found.hashed.remove(&0));
                assert!(hashed.is_some(), "{what}");
                meddle(&growing);
                let after = fs::read(&growing).ok();
                let grown = store.grow(&entry, hashed);
                let error = grown.expect_err(what).to_string();
                assert!(error.contains("x changed") && error.contains("push it again"), "{error}");
                assert_eq!(fs::read(&growing).ok(), after, "{what}: nothing is touched");
                assert!(!place.exists(), "{what}");
                fs::write(&growing, b"hel").unwrap();
            }
            // Again, as the error says.
            let found = survey(&store, &manifest(&[("x", Some(3))])).unwrap();
            let hashed = found.hashed[&0].clone();
            let right = hashed.digest();
            store
                .grow(&entry("x", Some(3)), Some(hashed))
                .unwrap()
                .finish(right, &mut Placed::default())
                .unwrap();
            assert_eq!(fs::read(&place).unwrap(), b"hel", "{what}");
        }
    }

    #[test]
    fn what_another_receiver_has_finished_meanwhile_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) =
            (Store::open(dir.path(), true).unwrap(), Store::open(dir.path(), true).unwrap());
        fs::write(dir.path().join("x.immwire-partial"), b"hel").unwrap();
        let offered = manifest(&[("x", Some(5))]);
        let (ours, theirs) = (survey(&one, &offered).unwrap(), survey(&two, &offered).unwrap());
        let grow = |store, found: &Survey| {
            Store::grow(store, &entry("x", Some(5)), Some(found.hashed[&0].clone()))
        };
        let mut growing = grow(&two, &theirs).unwrap();
        growing.append(b"l").unwrap();
        assert!(matches!(grow(&one, &ours), Err(StoreError::Locked(_))));
        growing.append(b"o").unwrap();
        growing.finish(of(b"hello"), &mut Placed::default()).unwrap();
        assert!(matches!(grow(&one, &ours), Err(StoreError::Changed(_))));
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"hello");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_partial_file_that_was_replaced_while_it_grew_gets_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), true).unwrap();
        let path = dir.path().join("x.immwire-partial");
        for (expected, replaced) in [(of(b"us"), true), (of(b"us"), false), (of(b"other"), true)] {
            let mut growing = store.grow(&entry("x", Some(2)), None).unwrap();
            growing.append(b"us").unwrap();
            fs::remove_file(&path).unwrap();
            let theirs = replaced.then(|| store.grow(&entry("x", Some(2)), None).unwrap());
            assert!(matches!(
                growing.finish(expected, &mut Placed::default()),
                Err(StoreError::Changed(_))
            ));
            assert!(!dir.path().join("x").exists());
            assert_eq!(path.exists(), replaced, "theirs stays");
            drop(theirs);
        }
    }

    #[test]
    fn a_whole_file_that_has_changed_since_it_was_hashed_is_not_said_to_be_right() {
        for (what, meddle) in MEDDLES {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open(dir.path(), false).unwrap();
            let place = dir.path().join("x");
            fs::write(&place, b"hel").unwrap();
            let found = survey(&store, &manifest(&[("x", Some(3))])).unwrap();
            assert!(found.whole.contains(&0), "{what}");
            meddle(&place);
            let mut placed = Placed::default();
            let failed = store.touch(&entry("x", Some(3)), &found.hashed[&0], &mut placed);
            assert!(matches!(failed, Err(StoreError::Changed(_))), "{what}");
        }
    }

    #[test]
    fn whole_files_may_be_one_under_several_names() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        let offered = manifest(&[("x", Some(3)), ("y", Some(3)), ("z", Some(3))]);
        fs::write(dir.path().join("x"), b"hel").unwrap();
        fs::hard_link(dir.path().join("x"), dir.path().join("y")).unwrap();
        fs::hard_link(dir.path().join("x"), dir.path().join("z")).unwrap();
        let found = survey(&store, &offered).unwrap();
        let mut placed = Placed::default();
        for ((file, _), number) in offered.files().zip(0..) {
            store.touch(file, &found.hashed[&number], &mut placed).unwrap();
        }
        assert_eq!(fs::metadata(dir.path().join("y")).unwrap().mtime(), 1_600_000_000);
    }

    #[test]
    fn an_existing_file_is_replaced_only_if_that_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x"), b"theirs").unwrap();
        let offered = manifest(&[("x", Some(2))]);
        let careful = Store::open(dir.path(), false).unwrap();
        assert!(matches!(survey(&careful, &offered), Err(StoreError::Exists(_))));
        let store = Store::open(dir.path(), true).unwrap();
        let found = survey(&store, &offered).unwrap();
        assert!(found.have.is_empty());
        let grow = |store: &Store| {
            let mut growing = store.grow(&entry("x", Some(2)), None).unwrap();
            growing.append(b"us").unwrap();
            growing.finish(of(b"us"), &mut Placed::default())
        };
        assert!(
            matches!(grow(&careful), Err(StoreError::Exists(_))),
            "the name was taken meanwhile"
        );
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"theirs");
        grow(&store).unwrap();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"us");
    }

    #[test]
    fn links_and_other_things_in_the_way_are_never_followed() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::open(dir.path(), true).unwrap();
        let victim = outside.path().join("victim");
        fs::write(&victim, b"untouched").unwrap();
        symlink(outside.path(), dir.path().join("link")).unwrap();
        symlink(&victim, dir.path().join("file")).unwrap();
        symlink(&victim, dir.path().join("other.immwire-partial")).unwrap();
        fs::write(dir.path().join("plain"), b"").unwrap();
        rustix::fs::mkfifoat(&store.root, "pipe", Mode::from_raw_mode(0o600)).unwrap();
        rustix::fs::mkfifoat(&store.root, "p.immwire-partial", Mode::from_raw_mode(0o600)).unwrap();
        for path in ["link/victim", "link/new", "plain/x"] {
            let grown = store.grow(&entry(path, Some(1)), None);
            assert!(matches!(grown, Err(StoreError::NotAFolder(_))), "{path}");
            let found = survey(&store, &manifest(&[(path, Some(1))]));
            assert!(matches!(found, Err(StoreError::NotAFolder(_))), "{path}");
        }
        for path in ["file", "pipe", "link"] {
            let found = survey(&store, &manifest(&[(path, Some(9))]));
            assert!(matches!(found, Err(StoreError::NotAFile(_))), "{path}");
        }
        for path in ["other", "p"] {
            let grown = store.grow(&entry(path, Some(1)), None);
            assert!(matches!(grown, Err(StoreError::NotAFile(_))), "{path}");
        }
        assert!(matches!(
            store.make_folders(&manifest(&[("link", None)]), |_| true),
            Err(StoreError::NotAFolder(_))
        ));
        // With leave to overwrite, a link under the final name is replaced, not written through.
        let mut growing = store.grow(&entry("file", Some(2)), None).unwrap();
        growing.append(b"us").unwrap();
        growing.finish(of(b"us"), &mut Placed::default()).unwrap();
        assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"us");
        assert_eq!(fs::read(&victim).unwrap(), b"untouched");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    }

    #[test]
    fn two_receivers_do_not_write_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) =
            (Store::open(dir.path(), false).unwrap(), Store::open(dir.path(), false).unwrap());
        let growing = one.grow(&entry("x", Some(1)), None).unwrap();
        let second = two.grow(&entry("x", Some(1)), None);
        assert!(matches!(second, Err(StoreError::Locked(_))));
        drop(growing);
        assert!(two.grow(&entry("x", Some(1)), None).is_ok());
    }

    #[test]
    fn folders_get_their_modes_last_and_only_if_they_are_new() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        fs::create_dir(dir.path().join("old")).unwrap();
        let before = fs::metadata(dir.path().join("old")).unwrap().mode();
        let offered =
            manifest(&[("new", None), ("new/deep", None), ("old", None), ("old/in", None)]);
        // Once broken off, before any has its mode, and once after the first had.
        let new = store.make_folders(&offered, |_| true).unwrap();
        assert_eq!(new, [0, 1, 3]);
        for folder in ["new", "new/deep", "old/in"] {
            let mode = fs::metadata(dir.path().join(folder)).unwrap().mode();
            assert_eq!(mode & 0o777, 0o700, "{folder}");
        }
        let store = Store::open(dir.path(), false).unwrap();
        assert_eq!(store.make_folders(&offered, |_| true).unwrap(), new);
        let mut first = true;
        let stopped = store.finish_folders(&offered, &new, |_| std::mem::take(&mut first));
        assert!(matches!(stopped, Err(StoreError::Stopped)));
        let new = store.make_folders(&offered, |_| true).unwrap();
        assert_eq!(new, [0, 1]);
        store.finish_folders(&offered, &new, |_| true).unwrap();
        assert!(store.make_folders(&offered, |_| true).unwrap().is_empty());
        for folder in ["new", "new/deep", "old/in"] {
            let metadata = fs::metadata(dir.path().join(folder)).unwrap();
            assert_eq!(
                (metadata.mode() & 0o777, metadata.mtime()),
                (0o640, 1_600_000_000),
                "{folder}"
            );
        }
        assert_eq!(fs::metadata(dir.path().join("old")).unwrap().mode(), before);
    }

    thread_local! {
        /// What this thread had put on the disk.
        static WRITTEN: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    }

    #[test]
    fn all_of_a_push_is_on_the_disk_at_its_end_and_each_folder_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("old")).unwrap();
        fs::write(dir.path().join("old/kept"), b"hel").unwrap();
        let offered = manifest(&[
            ("bare/in/x", Some(0)),
            ("new", None),
            ("new/deep", None),
            ("old", None),
            ("old/kept", Some(3)),
        ]);
        let store = Store::open(dir.path(), false).unwrap().with_disk(|file| {
            let inode = fstat(file)?.st_ino;
            WRITTEN.with_borrow_mut(|written| written.push(inode));
            Ok(())
        });
        let new = store.make_folders(&offered, |_| true).unwrap();
        store
            .grow(&entry("bare/in/x", Some(0)), None)
            .unwrap()
            .finish(of(b""), &mut Placed::default())
            .unwrap();
        let written = |paths: &[&str]| {
            let inode = |path: &&str| fs::metadata(dir.path().join(path)).unwrap().ino();
            assert_eq!(WRITTEN.take(), paths.iter().map(inode).collect::<Vec<_>>(), "{paths:?}");
        };
        written(&["bare/in/x", "bare/in"]);
        store.write_out_files(&offered, &BTreeSet::from([1]), |_| true).unwrap();
        written(&["old/kept"]);
        store.write_out_folders(&offered, &new, |_| true).unwrap();
        written(&["", "bare", "bare/in", "old"]);
        store.finish_folders(&offered, &new, |_| true).unwrap();
        written(&["new/deep", "new"]);
    }

    /// With its mode nobody but root can open it any more.
    #[test]
    fn a_file_that_nobody_may_read_is_on_the_disk_before_it_has_that_mode() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("kept");
        for (mode, at_once, later) in [(0o200, 1, 0), (0o640, 0, 1)] {
            fs::write(&place, b"hel").unwrap();
            let offered = Manifest::new(vec![Entry { mode, ..entry("kept", Some(3)) }]).unwrap();
            let store = Store::open(dir.path(), false).unwrap().with_disk(|file| {
                let mode = fstat(file)?.st_mode;
                WRITTEN.with_borrow_mut(|written| written.push(mode.into()));
                Ok(())
            });
            let found = survey(&store, &offered).unwrap();
            let kept = &offered.entries()[0];
            store.touch(kept, &found.hashed[&0], &mut Placed::default()).unwrap();
            let before = WRITTEN.take();
            assert_eq!(
                (before.len(), fs::metadata(&place).unwrap().mode() & 0o777),
                (at_once, mode)
            );
            assert!(before.iter().all(|then| then & 0o400 != 0), "it could not be opened then");
            store.write_out_files(&offered, &BTreeSet::from([0]), |_| true).unwrap();
            assert_eq!(WRITTEN.take().len(), later);
            fs::remove_file(&place).unwrap();
        }
    }

    #[test]
    fn a_disk_that_fails_fails_the_push_and_one_that_has_no_folders_does_not() {
        let disks: [(WriteOut, bool); 3] =
            [(|_| Ok(()), true), (|_| Err(Errno::IO), false), (|_| Err(Errno::INVAL), true)];
        for (disk, folders_are_well) in disks {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("kept"), b"").unwrap();
            let offered = manifest(&[("d", None), ("kept", Some(0))]);
            let store = Store::open(dir.path(), false).unwrap().with_disk(disk);
            let new = store.make_folders(&offered, |_| true).unwrap();
            let kept = store.write_out_files(&offered, &BTreeSet::from([0]), |_| true);
            assert_eq!(kept.is_ok(), folders_are_well);
            let folders = store.write_out_folders(&offered, &new, |_| true);
            let finished = store.finish_folders(&offered, &new, |_| true);
            assert_eq!([folders.is_ok(), finished.is_ok()], [folders_are_well; 2]);
        }
    }

    #[test]
    fn whoever_waits_is_heard_of_for_each_entry_and_may_stop_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        fs::write(dir.path().join("empty"), b"").unwrap();
        let offered = manifest(&[
            ("d", None),
            ("d/e", None),
            ("d/none", Some(1)),
            ("d/none either", Some(0)),
            ("empty", Some(0)),
            ("nowhere/none", Some(7)),
        ]);
        /// How often `work` calls; and that it stops wherever it is told to.
        fn calls<T>(
            mut work: impl FnMut(&mut dyn FnMut(u64) -> bool) -> Result<T, StoreError>,
        ) -> usize {
            let mut calls = 0;
            let all = work(&mut |_| {
                calls += 1;
                true
            });
            assert!(all.is_ok());
            for last in 1..=calls {
                let mut called = 0;
                let stopped = work(&mut |_| {
                    called += 1;
                    called < last
                });
                assert!(matches!(stopped, Err(StoreError::Stopped)), "at {last} of {calls}");
                assert_eq!(called, last);
            }
            calls
        }
        assert_eq!(calls(|working| store.survey(&offered, working)), 4);
        assert_eq!(calls(|working| store.make_folders(&offered, working)), 6);
        let here = manifest(&[("d", None), ("d/e", None), ("empty", Some(0))]);
        let whole = BTreeSet::from([0]);
        assert_eq!(calls(|working| store.write_out_files(&here, &whole, working)), 1);
        assert_eq!(calls(|working| store.write_out_folders(&here, &[1], working)), 1);
        assert_eq!(calls(|working| store.finish_folders(&offered, &[0, 1], working)), 2);
    }

    #[test]
    fn no_room_is_told_before_and_in_the_middle() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        let check = |size| {
            let offered = manifest(&[("new/x", Some(size))]);
            let stream = Stream::new(&offered, &[], &[]).unwrap();
            survey(&store, &offered).unwrap().check_room(&stream)
        };
        let most = (1 << 63) - 1;
        let error = check(most).unwrap_err();
        assert!(matches!(error, StoreError::DiskFull { needed, .. } if needed == most), "{error}");
        assert!(check(0).is_ok());
        let path = RelPath::new("x").unwrap();
        for (errno, text) in
            [(Errno::NOSPC, "disk full: x needs 3 B more"), (Errno::DQUOT, "0 B are free")]
        {
            let error = write_error(&store.root, &path, 2, 5, errno, "write").to_string();
            assert!(error.contains(text), "{error}");
        }
        let error = write_error(&store.root, &path, 2, 5, Errno::FBIG, "write");
        assert!(matches!(error, StoreError::TooLarge { size: 5, .. }));
    }

    #[test]
    fn room_is_judged_by_what_the_file_system_counts() {
        let room = |bytes, inodes| Room { bytes, inodes };
        let needs = |bytes, reclaimable, files| Needs { bytes, reclaimable, files };
        let none: Result<(), &str> = Ok(());
        for (room, needs, expected) in [
            (room(Some(10), Some(2)), needs(10, 0, 2), none),
            (room(Some(10), Some(2)), needs(11, 0, 2), Err("the push needs 11 B more, 10 B are")),
            (room(Some(10), Some(2)), needs(11, 1, 2), none),
            (room(Some(0), Some(2)), needs(9, 8, 2), Err("needs 9 B more, 8 B are free")),
            (room(Some(10), Some(2)), needs(9, u64::MAX, 2), none),
            (room(Some(10), Some(1)), needs(10, 0, 2), Err("needs 2 more inodes")),
            (room(Some(10), None), needs(10, 0, 2), none),
            (room(None, Some(2)), needs(u64::MAX, 0, 2), none),
            (room(None, None), needs(u64::MAX, 0, u64::MAX), none),
        ] {
            let judged = room.check(needs).map_err(|error| error.to_string());
            match (&judged, expected) {
                (Ok(()), Ok(())) => {}
                (Err(said), Err(why)) if said.contains(why) => {}
                _ => panic!("{room:?} {needs:?}: {judged:?}"),
            }
        }
        let path = RelPath::new("x").unwrap();
        for (room, needed, text) in [
            (room(Some(5), Some(0)), 0, "disk full: x needs 1 more inodes"),
            (room(Some(5), Some(0)), 7, "disk full: x needs 1 more inodes"),
            (room(None, Some(0)), 7, "disk full: x needs 1 more inodes"),
            (room(Some(0), Some(0)), 7, "disk full: x needs 7 B more, 0 B are free"),
            (room(Some(5), Some(1)), 7, "disk full: x needs 7 B more, 5 B are free"),
            (room(Some(5), None), 0, "disk full: x cannot be made, 5 B are free"),
        ] {
            let error = room.full(&path, needed).to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    /// A mount below the folder.
    #[test]
    fn room_is_judged_for_each_file_system_by_itself() {
        let room = |bytes, inodes| Room { bytes: Some(bytes), inodes: Some(inodes) };
        let needs = |bytes, files| Needs { bytes, files, ..Needs::default() };
        for (places, well) in [
            (vec![], true),
            (vec![(needs(5, 1), room(5, 1)), (needs(9, 1), room(9, 1))], true),
            // The other has room enough for both.
            (vec![(needs(5, 1), room(99, 99)), (needs(9, 1), room(8, 1))], false),
            (vec![(needs(5, 2), room(5, 1)), (needs(9, 1), room(99, 99))], false),
            // The first has none, and nothing goes there.
            (vec![(needs(0, 0), room(0, 0)), (needs(9, 1), room(9, 1))], true),
        ] {
            assert_eq!(check_all(places.clone()).is_ok(), well, "{places:?}");
        }
        let offered = manifest(&[("a", Some(7)), ("b", Some(5)), ("c", Some(3)), ("d", Some(2))]);
        let (have, keep) = ([(2, 1), (3, 2)], Digest([0; 32]));
        let have = have.map(|(file, bytes)| Have { file, bytes, digest: keep });
        let keep = have.clone().map(|Have { file, bytes, digest }| Keep { file, bytes, digest });
        let stream = Stream::new(&offered, &have, &keep).unwrap();
        let partial = BTreeMap::from([(1, 4096), (2, 4096)]);
        let found = Survey { devices: vec![8, 9, 9, 8], partial, ..Survey::default() };
        let (first, second) = (needs(7, 1), Needs { reclaimable: 4096, ..needs(7, 0) });
        assert_eq!(found.needs(&stream), BTreeMap::from([(8, first), (9, second)]));
    }

    #[test]
    fn a_file_system_that_counts_nothing_has_unknown_room() {
        let mut stat = fstatvfs(fs::File::open("/proc").unwrap()).unwrap();
        for (blocks, files) in [(0, 0), (0, 7), (7, 0), (7, 7)] {
            stat = StatVfs { f_blocks: blocks, f_files: files, ..stat };
            stat = StatVfs { f_bavail: 3, f_frsize: 4096, f_favail: 5, ..stat };
            let expected =
                Room { bytes: (blocks > 0).then_some(3 * 4096), inodes: (files > 0).then_some(5) };
            assert_eq!(Room::of(&stat), expected);
        }
    }

    #[test]
    fn what_a_partial_file_takes_is_free_again_if_it_starts_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), true).unwrap();
        let sizes = [("again", 1 << 20), ("kept", 1 << 20), ("new", 1 << 20), ("whole", 3)];
        let entries: Vec<_> = sizes.iter().map(|(name, size)| (*name, Some(*size))).collect();
        let offered = manifest(&entries);
        fs::write(dir.path().join("again.immwire-partial"), vec![1; 1 << 19]).unwrap();
        fs::write(dir.path().join("kept.immwire-partial"), vec![1; 1 << 19]).unwrap();
        fs::write(dir.path().join("whole.immwire-partial"), b"hel").unwrap();
        let found = survey(&store, &offered).unwrap();
        let keep = [(1, 1 << 19), (3, 3)];
        let keep = keep.map(|(file, bytes)| Keep { file, bytes, digest: Digest([0; 32]) });
        let stream = Stream::new(&offered, &found.have, &keep).unwrap();
        let taken = fs::metadata(dir.path().join("again.immwire-partial")).unwrap().blocks() * 512;
        let expected = Needs { bytes: 5 << 19, reclaimable: taken, files: 1 };
        assert_eq!(found.needs(&stream).into_values().collect::<Vec<_>>(), [expected]);
        // And before anything of the push comes.
        store.give_back(&offered, &found, &stream).unwrap();
        let length = |name: &str| fs::metadata(dir.path().join(name)).unwrap().len();
        let partial = ["again", "kept", "whole"].map(|it| length(&format!("{it}.immwire-partial")));
        assert_eq!(partial, [0, 1 << 19, 3]);
        assert!(!dir.path().join("new.immwire-partial").exists());
    }

    #[test]
    fn a_hasher_is_kept_only_where_a_file_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        fs::write(dir.path().join("all.immwire-partial"), b"hel").unwrap();
        fs::write(dir.path().join("empty"), b"").unwrap();
        fs::write(dir.path().join("part.immwire-partial"), b"hel").unwrap();
        fs::write(dir.path().join("whole"), b"hel").unwrap();
        let sizes = [("all", 3), ("empty", 0), ("part", 4), ("whole", 3)];
        let entries: Vec<_> = sizes.iter().map(|(name, size)| (*name, Some(*size))).collect();
        let found = survey(&store, &manifest(&entries)).unwrap();
        for (number, bytes) in [(0, &b"hel"[..]), (1, b""), (2, b"hel"), (3, b"hel")] {
            let hashed = &found.hashed[&number];
            assert_eq!((hashed.digest(), hashed.seen.bytes()), (of(bytes), bytes.len() as u64));
            assert_eq!(matches!(hashed.seen, Seen::Start(_)), number == 2, "{number}");
        }
        assert!(size_of::<Hashed>() < 128);
    }

    #[test]
    fn what_comes_after_all_of_a_file_makes_it_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        fs::write(dir.path().join("x.immwire-partial"), b"hel").unwrap();
        let mut found = survey(&store, &manifest(&[("x", Some(3))])).unwrap();
        let mut growing = store.grow(&entry("x", Some(3)), found.hashed.remove(&0)).unwrap();
        growing.append(b"lo").unwrap();
        assert!(matches!(
            growing.finish(of(b"hel"), &mut Placed::default()),
            Err(StoreError::Corrupt(_))
        ));
    }

    #[test]
    fn mode_and_time_are_set_where_they_differ_and_only_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), false).unwrap();
        let place = dir.path().join("x");
        let offered = manifest(&[("x", Some(3))]);
        let touch = || {
            let found = survey(&store, &offered).unwrap();
            let before = found.hashed[&0].stamp;
            let mut placed = Placed::default();
            store.touch(&entry("x", Some(3)), &found.hashed[&0], &mut placed).unwrap();
            let metadata = fs::metadata(&place).unwrap();
            let here = (metadata.mode() & 0o7777, metadata.mtime(), metadata.mtime_nsec());
            assert_eq!(here, (0o640, 1_600_000_000, 5));
            placed.touched[&before] == before
        };
        fs::write(&place, b"hel").unwrap();
        touch();
        assert!(touch(), "nothing to be set, and it is set");
        fs::set_permissions(&place, fs::Permissions::from_mode(0o600)).unwrap();
        touch();
        fs::File::open(&place).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
        touch();
        assert!(touch());
    }

    #[test]
    fn only_who_may_not_is_forgiven_for_mode_and_time() {
        for errno in [Errno::PERM, Errno::ROFS, Errno::IO, Errno::ACCESS, Errno::NOSPC] {
            let forgiven = matches!(errno, Errno::PERM | Errno::ROFS);
            assert_eq!(tolerated(Err(errno)).is_ok(), forgiven, "{errno}");
        }
        assert!(tolerated(Ok(())).is_ok());
    }
}
