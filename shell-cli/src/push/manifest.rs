//! What is to be sent: files and folders, with sizes, modes and times.
//!
//! Made by the sender from its disk ([`collect`]), checked by the receiver as a value
//! ([`Manifest::new`]); only the first touches a disk, and only to read.
//!
//! # Invariants
//!
//! In a [`Manifest`] no two entries have one path, no file is also a folder of another entry, and the
//! sizes add up without overflow. Paths are [`RelPath`]s.

use super::path::{PathError, Printable, RelPath};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The most entries of one push.
pub const ENTRIES_MAX: usize = 1 << 20;

/// The permission bits that travel; set-user-id and its like do not.
pub const MODE_MASK: u32 = 0o777;

/// A file or a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Where it goes, below the receiver's folder.
    pub path: RelPath,
    /// Bytes of a file; `None` for a folder.
    pub size: Option<u64>,
    /// Permission bits.
    pub mode: u32,
    /// Last change, in seconds since 1970.
    pub mtime_s: i64,
    /// And nanoseconds of that second.
    pub mtime_ns: u32,
}

/// Why a manifest is refused, by either side.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Two entries have one path.
    #[error("{0} is there twice")]
    Twice(RelPath),
    /// A file is also the folder of something.
    #[error("{0} is a file and a folder at once")]
    FileAndFolder(RelPath),
    /// The sizes add up to more than 2^63 bytes.
    #[error("the files have more than 2^63 bytes together")]
    TooBig,
    /// Too many entries.
    #[error("{0} entries of at most {ENTRIES_MAX}")]
    TooMany(usize),
    /// There is nothing.
    #[error("nothing to send")]
    Empty,
    /// A time that is none.
    #[error("{path} has a time with {nanos} nanoseconds in a second")]
    BadTime {
        /// Whose time it is.
        path: RelPath,
        /// What it has.
        nanos: u32,
    },
}

/// Checked entries, in path order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    entries: Vec<Entry>,
    total_bytes: u64,
}

impl Manifest {
    /// Checks `entries` against each other. Bits of `mode` that do not travel are cleared.
    ///
    /// # Errors
    ///
    /// [`ManifestError`]: the first rule they break.
    pub fn new(mut entries: Vec<Entry>) -> Result<Self, ManifestError> {
        if entries.is_empty() {
            return Err(ManifestError::Empty);
        }
        if entries.len() > ENTRIES_MAX {
            return Err(ManifestError::TooMany(entries.len()));
        }
        entries.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        let mut total_bytes = 0_u64;
        let mut kinds = BTreeMap::new();
        for entry in &mut entries {
            entry.mode &= MODE_MASK;
            if entry.mtime_ns >= 1_000_000_000 {
                return Err(ManifestError::BadTime {
                    path: entry.path.clone(),
                    nanos: entry.mtime_ns,
                });
            }
            total_bytes = total_bytes
                .checked_add(entry.size.unwrap_or(0))
                .filter(|sum| i64::try_from(*sum).is_ok())
                .ok_or(ManifestError::TooBig)?;
        }
        for entry in &entries {
            if kinds.insert(entry.path.as_str(), entry.size.is_some()).is_some() {
                return Err(ManifestError::Twice(entry.path.clone()));
            }
        }
        for entry in &entries {
            let path = entry.path.as_str();
            let mut folders = path.match_indices('/').filter_map(|(end, _)| path.get(..end));
            if folders.any(|folder| kinds.get(folder) == Some(&true)) {
                return Err(ManifestError::FileAndFolder(entry.path.clone()));
            }
        }
        drop(kinds);
        Ok(Self { entries, total_bytes })
    }

    /// The entries, in path order: a folder before what is in it.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Files alone, each with its size; their order is the order of the stream.
    pub fn files(&self) -> impl Iterator<Item = (&Entry, u64)> {
        self.entries.iter().filter_map(|entry| Some((entry, entry.size?)))
    }

    /// Bytes of all files together; at most 2^63 - 1.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

/// What the sender found on its disk.
#[derive(Debug)]
pub struct Collected {
    /// What goes to the receiver.
    pub manifest: Manifest,
    /// Where each file of the manifest is, in the order of [`Manifest::files`].
    pub sources: Vec<PathBuf>,
    /// What is neither file nor folder, and stays here.
    pub skipped: Vec<PathBuf>,
}

/// Why the sender's files could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// A file or folder could not be looked at.
    #[error("cannot read {}: {source}", shown(path))]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A name cannot travel.
    #[error("cannot send {}: {reason}", shown(path))]
    Name {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: PathError,
    },
    /// A name is not UTF-8.
    #[error("cannot send {0:?}: the name is not UTF-8")]
    NotUtf8(PathBuf),
    /// All that was named is neither file nor folder.
    #[error("nothing to send: {}", skipped(.0))]
    Skipped(Vec<PathBuf>),
    /// The files cannot go together.
    #[error("cannot send these together: {0}")]
    Manifest(#[from] ManifestError),
}

/// Lists `arguments` and all that is below them. Each goes by its own last name; what ends in `.`, `..`
/// or `/` has none, and goes by that of the folder. Symbolic links are followed if they are arguments,
/// and skipped below.
///
/// # Errors
///
/// [`CollectError`], naming the file.
pub fn collect(arguments: &[PathBuf]) -> Result<Collected, CollectError> {
    let mut walk = Walk::default();
    for argument in arguments {
        let read = |source| CollectError::Read { path: argument.clone(), source };
        let metadata = fs::metadata(argument).map_err(read)?;
        let found;
        let name = match own_name(argument) {
            Some(name) => name,
            None => {
                found = argument.canonicalize().map_err(read)?;
                found.file_name().unwrap_or_default()
            }
        };
        let name = name.to_str().ok_or_else(|| CollectError::NotUtf8(argument.clone()))?;
        walk.visit(argument, name.to_owned(), &metadata)?;
    }
    if walk.entries.is_empty() && !walk.skipped.is_empty() {
        return Err(CollectError::Skipped(walk.skipped));
    }
    let manifest = Manifest::new(walk.entries)?;
    let source = |(entry, _): (&Entry, u64)| walk.sources.remove(&entry.path).unwrap_or_default();
    Ok(Collected {
        sources: manifest.files().map(source).collect(),
        skipped: walk.skipped,
        manifest,
    })
}

/// What comes after the last `/`, if it is a name. Not `Path::file_name`, which takes the one before a
/// final `/` or `/.`, even if that is a link's.
fn own_name(argument: &Path) -> Option<&OsStr> {
    let last = argument.as_os_str().as_bytes().rsplit(|byte| *byte == b'/').next()?;
    (!matches!(last, b"" | b"." | b"..")).then(|| OsStr::from_bytes(last))
}

#[derive(Default)]
struct Walk {
    entries: Vec<Entry>,
    sources: BTreeMap<RelPath, PathBuf>,
    skipped: Vec<PathBuf>,
}

impl Walk {
    /// Depth is bounded by [`RelPath`].
    fn visit(&mut self, from: &Path, to: String, metadata: &Metadata) -> Result<(), CollectError> {
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_dir() {
            self.skipped.push(from.to_owned());
            return Ok(());
        }
        let path = RelPath::new(to)
            .map_err(|reason| CollectError::Name { path: from.to_owned(), reason })?;
        let read = |source| CollectError::Read { path: from.to_owned(), source };
        if kind.is_dir() {
            for child in fs::read_dir(from).map_err(read)? {
                let child = child.map_err(read)?;
                let name = child.file_name();
                let name = name.to_str().ok_or_else(|| CollectError::NotUtf8(child.path()))?;
                let metadata = child
                    .metadata()
                    .map_err(|source| CollectError::Read { path: child.path(), source })?;
                self.visit(&child.path(), format!("{}/{name}", path.as_str()), &metadata)?;
            }
        } else {
            self.sources.insert(path.clone(), from.to_owned());
        }
        self.entries.push(Entry {
            path,
            size: kind.is_file().then_some(metadata.len()),
            mode: metadata.mode() & MODE_MASK,
            mtime_s: metadata.mtime(),
            mtime_ns: u32::try_from(metadata.mtime_nsec()).unwrap_or(0),
        });
        Ok(())
    }
}

/// Why something was left out.
pub const SKIPPED: &str = "is neither file nor folder, and is skipped";

fn skipped(paths: &[PathBuf]) -> String {
    let skipped = |path: &PathBuf| format!("{} {SKIPPED}", shown(path));
    paths.iter().map(skipped).collect::<Vec<_>>().join("; ")
}

/// A path of ours for a message, without control characters.
#[must_use]
pub fn shown(path: &Path) -> String {
    Printable(&path.to_string_lossy()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, size: Option<u64>) -> Entry {
        Entry { path: RelPath::new(path).unwrap(), size, mode: 0o4755, mtime_s: 0, mtime_ns: 0 }
    }

    fn check(entries: &[(&str, Option<u64>)]) -> Result<Manifest, ManifestError> {
        Manifest::new(entries.iter().map(|(path, size)| entry(path, *size)).collect())
    }

    #[test]
    fn entries_are_ordered_summed_and_stripped() {
        let manifest =
            check(&[("b", Some(3)), ("a/x", Some(4)), ("a", None), ("a-", Some(0))]).unwrap();
        let paths: Vec<_> = manifest.entries().iter().map(|entry| entry.path.as_str()).collect();
        assert_eq!(paths, ["a", "a-", "a/x", "b"]);
        assert_eq!(manifest.total_bytes(), 7);
        assert_eq!(manifest.files().count(), 3);
        assert!(manifest.entries().iter().all(|entry| entry.mode == 0o755));
    }

    #[test]
    fn contradictions_are_refused() {
        let path = |path| RelPath::new(path).unwrap();
        assert_eq!(check(&[]), Err(ManifestError::Empty));
        assert_eq!(check(&[("a", None), ("a", Some(1))]), Err(ManifestError::Twice(path("a"))));
        for file in ["a", "a/b", "a/b/c"] {
            let error = Err(ManifestError::FileAndFolder(path("a/b/c/d")));
            assert_eq!(check(&[("a/b/c/d", Some(1)), (file, Some(1)), ("a-", None)]), error);
            assert!(check(&[("a/b/c/d", Some(1)), (file, None)]).is_ok());
        }
        assert_eq!(check(&[("a", Some(u64::MAX)), ("b", Some(1))]), Err(ManifestError::TooBig));
        assert_eq!(check(&[("a", Some(1 << 63))]), Err(ManifestError::TooBig));
        let late = Entry { mtime_ns: 1_000_000_000, ..entry("a", None) };
        assert!(matches!(Manifest::new(vec![late]), Err(ManifestError::BadTime { .. })));
        let many = vec![entry("a", None); ENTRIES_MAX + 1];
        assert_eq!(Manifest::new(many), Err(ManifestError::TooMany(ENTRIES_MAX + 1)));
    }

    #[test]
    fn a_tree_is_listed_with_its_empty_parts_and_without_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("model");
        fs::create_dir_all(top.join("empty")).unwrap();
        fs::write(top.join("weights"), b"12345").unwrap();
        fs::write(top.join("zero"), b"").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", top.join("link")).unwrap();
        fs::write(dir.path().join("extra"), b"1").unwrap();
        let found = collect(&[top.clone(), dir.path().join("extra")]).unwrap();
        let entries: Vec<_> = found
            .manifest
            .entries()
            .iter()
            .map(|entry| (entry.path.as_str(), entry.size))
            .collect();
        assert_eq!(
            entries,
            [
                ("extra", Some(1)),
                ("model", None),
                ("model/empty", None),
                ("model/weights", Some(5)),
                ("model/zero", Some(0)),
            ]
        );
        let names: Vec<_> = found.sources.iter().map(|path| path.file_name().unwrap()).collect();
        assert_eq!(names, ["extra", "weights", "zero"]);
        assert_eq!(found.skipped.len(), 1);
        assert!(found.skipped[0].ends_with("link"));
    }

    #[test]
    fn each_argument_goes_by_its_own_name_and_links_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let at = |path: &str| top.join(path);
        fs::create_dir_all(at("blobs/deep")).unwrap();
        fs::create_dir(at("snapshot")).unwrap();
        fs::write(at("blobs/1f3a"), b"12345").unwrap();
        fs::write(at("blobs/deep/x"), b"1").unwrap();
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
        link("../blobs/1f3a", "snapshot/model.safetensors");
        link("model.safetensors", "snapshot/same.safetensors");
        link("../blobs/deep", "snapshot/folder");
        let listed = |paths: &[&str]| {
            let paths: Vec<_> = paths.iter().map(|path| at(path)).collect();
            let found = collect(&paths).unwrap();
            for (source, (_, size)) in found.sources.iter().zip(found.manifest.files()) {
                assert_eq!(fs::read(source).unwrap().len() as u64, size);
            }
            let entries = found.manifest.entries().iter();
            entries.map(|entry| (entry.path.to_string(), entry.size)).collect::<Vec<_>>()
        };
        let (model, same) = ("snapshot/model.safetensors", "snapshot/same.safetensors");
        let file = |name: &str| (name.to_owned(), Some(5));
        assert_eq!(listed(&[model]), [file("model.safetensors")]);
        assert_eq!(listed(&[model, same]), [file("model.safetensors"), file("same.safetensors")]);
        let folder = |name: &str| vec![(name.to_owned(), None), (format!("{name}/x"), Some(1))];
        assert_eq!(listed(&["snapshot/folder"]), folder("folder"));
        // Of no name of their own: that of the folder.
        let of_deep = [
            "blobs/deep",
            "blobs/deep/",
            "blobs/deep//",
            "blobs/deep/.",
            "blobs/deep/./",
            "snapshot/../blobs/deep/",
            "snapshot/folder/",
            "snapshot/folder/.",
        ];
        for path in of_deep {
            assert_eq!(listed(&[path]), folder("deep"), "{path}");
        }
        let blobs = listed(&["blobs"]);
        assert_eq!(blobs.len(), 4);
        for path in ["blobs/deep/..", "blobs/deep/../", "snapshot/folder/.."] {
            assert_eq!(listed(&[path]), blobs, "{path}");
        }
        let broken = at("snapshot/broken");
        std::os::unix::fs::symlink("nowhere", &broken).unwrap();
        let error = collect(&[broken]).unwrap_err().to_string();
        assert!(error.contains("snapshot/broken"), "{error}");
        assert!(collect(&[PathBuf::new()]).is_err());
        assert!(matches!(collect(&[at("blobs/1f3a/")]), Err(CollectError::Read { .. })));
    }

    #[test]
    fn what_was_skipped_is_named_if_nothing_is_left() {
        let null = PathBuf::from("/dev/null");
        let error = collect(std::slice::from_ref(&null)).unwrap_err().to_string();
        let why = "nothing to send: /dev/null is neither file nor folder";
        assert!(error.contains(why), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let found = collect(&[null.clone(), dir.path().to_owned()]).unwrap();
        assert_eq!((found.skipped, found.manifest.entries().len()), (vec![null], 1));
        assert!(matches!(collect(&[]), Err(CollectError::Manifest(ManifestError::Empty))));
    }

    #[test]
    fn our_own_paths_are_shown_without_control_characters() {
        let dir = tempfile::tempdir().unwrap();
        let missing = collect(&[dir.path().join("a\u{1b}[2J")]).unwrap_err();
        let reserved = dir.path().join("b\u{1b}[2J.immwire-partial");
        fs::write(&reserved, b"").unwrap();
        for error in [missing, collect(&[reserved]).unwrap_err()] {
            let shown = error.to_string();
            assert!(shown.contains("[2J") && !shown.contains('\u{1b}'), "{shown}");
        }
    }

    #[test]
    fn what_cannot_travel_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = collect(&[dir.path().join("missing")]).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
        let reserved = dir.path().join("x.immwire-partial");
        fs::write(&reserved, b"").unwrap();
        assert!(matches!(collect(&[reserved]), Err(CollectError::Name { .. })));
        let odd = dir.path().join(OsStr::from_bytes(b"\xff\xfe"));
        if fs::write(&odd, b"").is_ok() {
            assert!(matches!(collect(&[odd]), Err(CollectError::NotUtf8(_))));
        }
        let twin = dir.path().join("sub/same");
        fs::create_dir_all(twin.parent().unwrap()).unwrap();
        fs::write(&twin, b"").unwrap();
        fs::write(dir.path().join("same"), b"").unwrap();
        let both = collect(&[twin, dir.path().join("same")]);
        assert!(matches!(both, Err(CollectError::Manifest(ManifestError::Twice(_)))));
    }
}
