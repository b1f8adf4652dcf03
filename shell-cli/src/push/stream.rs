//! The files of a push as one stream of bytes, and the stream as chunks in slots.
//!
//! For each file that is not complete already: the bytes from where it starts, then 32 bytes of
//! digest. Files follow each other without a gap, so that many small ones share a chunk. Both sides
//! compute the same stream from the manifest and from what is kept; nothing else says where a file
//! ends. Pure arithmetic.
//!
//! # Invariants
//!
//! - The pieces of all chunks, in order, are the stream: every byte of every file from its start, each
//!   once, and each digest after its file.
//! - A chunk is written to slot `number % slots`, so a slot is free for its next chunk once the chunk
//!   `slots` earlier has been consumed.

use super::manifest::Manifest;
use super::message::{Have, Keep};
use serde::{Deserialize, Serialize};

/// Bytes of a digest.
pub const DIGEST_BYTES: u64 = 32;

/// How the receiver's staging area is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staging {
    /// Slots, each for one chunk.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Bytes of a page; divides a slot.
    pub page_bytes: u32,
}

/// Why a plan of the other side is refused. The peer's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The staging area cannot be used.
    #[error("a staging area of {} slots of {} bytes in pages of {}", .0.slots, .0.slot_bytes, .0.page_bytes)]
    BadStaging(Staging),
    /// A file that was not offered.
    #[error("file {file} of {files}")]
    NoSuchFile {
        /// What was named.
        file: u32,
        /// How many there are.
        files: usize,
    },
    /// A file is named twice, or out of order.
    #[error("file {0} out of order")]
    OutOfOrder(u32),
    /// More of a file than it has, or than was said before.
    #[error("{bytes} bytes of file {file}, of at most {at_most}")]
    TooMuch {
        /// Which file.
        file: u32,
        /// What was said.
        bytes: u64,
        /// What is possible.
        at_most: u64,
    },
}

impl Staging {
    /// The most slots: each takes a counter.
    pub const SLOTS_MAX: u32 = 256;
    /// The most bytes of the whole area.
    pub const BYTES_MAX: u64 = 1 << 30;

    /// Checks what another side said.
    ///
    /// # Errors
    ///
    /// [`StreamError::BadStaging`]: nothing fits, a page does not divide a slot, or it is too big.
    pub fn check(self) -> Result<Self, StreamError> {
        let good = (1..=Self::SLOTS_MAX).contains(&self.slots)
            && self.page_bytes > 0
            && self.slot_bytes > 0
            && self.slot_bytes.is_multiple_of(self.page_bytes)
            && self.bytes() <= Self::BYTES_MAX;
        if good { Ok(self) } else { Err(StreamError::BadStaging(self)) }
    }

    /// Bytes of the whole area.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.slots) * u64::from(self.slot_bytes)
    }

    /// Pages that a chunk of `chunk_bytes` takes; the last one may be partly unused.
    #[must_use]
    pub fn pages(self, chunk_bytes: u32) -> u32 {
        chunk_bytes.div_ceil(self.page_bytes.max(1))
    }

    /// The slot of chunk number `chunk`.
    #[must_use]
    pub fn slot(self, chunk: u64) -> u32 {
        u32::try_from(chunk % u64::from(self.slots.max(1))).unwrap_or(0)
    }

    /// The number of the first page of `slot`, counted over the whole area.
    #[must_use]
    pub fn first_page(self, slot: u32) -> u32 {
        slot.saturating_mul(self.slot_bytes / self.page_bytes.max(1))
    }
}

/// A run of bytes that belongs to one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Bytes of the file itself.
    Bytes {
        /// Number among the files.
        file: u32,
        /// Where in the file.
        offset: u64,
        /// How many; at least 1.
        len: u32,
    },
    /// Bytes of its digest.
    Digest {
        /// Number among the files.
        file: u32,
        /// Where in the digest.
        offset: u32,
        /// How many; at least 1.
        len: u32,
    },
}

impl Piece {
    /// Bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(self) -> u32 {
        match self {
            Self::Bytes { len, .. } | Self::Digest { len, .. } => len,
        }
    }

    /// Of these, the bytes of the file itself.
    #[must_use]
    pub fn file_bytes(self) -> u64 {
        if let Self::Bytes { len, .. } = self { len.into() } else { 0 }
    }
}

/// Sizes of the files and where each starts: the whole stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    /// Size, and bytes kept; `None` for a file that is complete and has no part in the stream.
    files: Vec<(u64, Option<u64>)>,
    len: u64,
}

impl Stream {
    /// The stream of `manifest`'s files when `keep` is kept. A file kept whole has no part in it.
    ///
    /// `keep` may name only what `have` says is there, and just as much of it.
    ///
    /// # Errors
    ///
    /// [`StreamError`]: `keep` or `have` names what is not there.
    pub fn new(manifest: &Manifest, have: &[Have], keep: &[Keep]) -> Result<Self, StreamError> {
        let mut files: Vec<(u64, Option<u64>)> =
            manifest.files().map(|(_, size)| (size, Some(0))).collect();
        let mut had = vec![None; files.len()];
        for (file, bytes) in in_order(have.iter().map(|have| (have.file, have.bytes)), files.len())?
        {
            let at_most = files.get(file as usize).map_or(0, |(size, _)| *size);
            if bytes > at_most {
                return Err(StreamError::TooMuch { file, bytes, at_most });
            }
            if let Some(slot) = had.get_mut(file as usize) {
                *slot = Some(bytes);
            }
        }
        for (file, bytes) in in_order(keep.iter().map(|keep| (keep.file, keep.bytes)), files.len())?
        {
            let had = had.get(file as usize).copied().flatten();
            if had != Some(bytes) {
                return Err(StreamError::TooMuch { file, bytes, at_most: had.unwrap_or(0) });
            }
            if let Some((size, start)) = files.get_mut(file as usize) {
                *start = (bytes < *size).then_some(bytes);
            }
        }
        // No overflow: a manifest has less than 2^63 bytes in at most 2^20 files.
        let len = files
            .iter()
            .filter_map(|(size, start)| start.map(|start| size - start + DIGEST_BYTES))
            .sum();
        Ok(Self { files, len })
    }

    /// Bytes of the stream.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// Bytes of files that are in the stream, without digests.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().filter_map(|(size, start)| Some(size - (*start)?)).sum()
    }

    /// Bytes of `file`, those that are kept too; 0 if it is not there.
    #[must_use]
    pub fn size(&self, file: u32) -> u64 {
        self.files.get(file as usize).map_or(0, |(size, _)| *size)
    }

    /// Where `file` starts; `None` if it is complete, or not there.
    #[must_use]
    pub fn start(&self, file: u32) -> Option<u64> {
        self.files.get(file as usize)?.1
    }

    /// How many chunks of `slot_bytes` it takes.
    #[must_use]
    pub fn chunks(&self, slot_bytes: u32) -> u64 {
        self.len.div_ceil(u64::from(slot_bytes.max(1)))
    }

    /// Walks the stream from its start.
    #[must_use]
    pub fn walk(&self) -> Walk<'_> {
        Walk { stream: self, file: 0, position: None }
    }
}

fn in_order(
    named: impl Iterator<Item = (u32, u64)>,
    files: usize,
) -> Result<Vec<(u32, u64)>, StreamError> {
    let mut last = None;
    named
        .map(|(file, bytes)| {
            if file as usize >= files {
                return Err(StreamError::NoSuchFile { file, files });
            }
            if last >= Some(file) {
                return Err(StreamError::OutOfOrder(file));
            }
            last = Some(file);
            Ok((file, bytes))
        })
        .collect()
}

/// A place in a [`Stream`].
#[derive(Debug, Clone)]
pub struct Walk<'a> {
    stream: &'a Stream,
    file: usize,
    /// In the current file: offset in it, or past its end by so much of the digest.
    position: Option<u64>,
}

impl Walk<'_> {
    /// The next piece, of at most `room` bytes; `None` at the end, or for no room.
    pub fn next_piece(&mut self, room: u32) -> Option<Piece> {
        if room == 0 {
            return None;
        }
        loop {
            let (size, start) = *self.stream.files.get(self.file)?;
            let Some(start) = start else {
                self.file += 1;
                continue;
            };
            let file = u32::try_from(self.file).ok()?;
            let at = self.position.unwrap_or(start);
            let end = if at < size { size } else { size + DIGEST_BYTES };
            // At most `room`, so it fits.
            let len = u32::try_from((end - at).min(u64::from(room))).unwrap_or(room);
            let next = at + u64::from(len);
            if next == size + DIGEST_BYTES {
                self.file += 1;
                self.position = None;
            } else {
                self.position = Some(next);
            }
            return Some(if at < size {
                Piece::Bytes { file, offset: at, len }
            } else {
                let offset = u32::try_from(at - size).unwrap_or(0);
                Piece::Digest { file, offset, len }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::push::manifest::Entry;
    use crate::push::message::Digest;
    use crate::push::path::RelPath;

    fn manifest(sizes: &[u64]) -> Manifest {
        let entry = |(number, size): (usize, &u64)| Entry {
            path: RelPath::new(format!("{number:03}")).unwrap(),
            size: Some(*size),
            mode: 0,
            mtime_s: 0,
            mtime_ns: 0,
        };
        Manifest::new(sizes.iter().enumerate().map(entry).collect()).unwrap()
    }

    fn have(file: u32, bytes: u64) -> Have {
        Have { file, bytes, digest: Digest([0; 32]) }
    }

    /// The stream by its definition: one value for each byte.
    fn oracle(files: &[(u64, Option<u64>)]) -> Vec<(u32, u64)> {
        let one = |(file, (size, keep)): (u32, &(u64, Option<u64>))| {
            let complete = *keep == Some(*size);
            let range = if complete { 0..0 } else { keep.unwrap_or(0)..size + 32 };
            range.map(|at| (file, at)).collect::<Vec<_>>()
        };
        (0..).zip(files).flat_map(one).collect()
    }

    #[test]
    fn the_pieces_are_the_stream_for_all_small_files_starts_and_slots() {
        let choices: Vec<(u64, Option<u64>)> = (0..4)
            .flat_map(|size| (0..=size).map(Some).chain([None]).map(move |keep| (size, keep)))
            .collect();
        for &a in &choices {
            for &b in &choices {
                let files = [a, b, (5, None)];
                let named = || (0..).zip(&files).filter_map(|(n, (_, keep))| Some((n, (*keep)?)));
                let have: Vec<_> = named().map(|(file, bytes)| have(file, bytes)).collect();
                let keep: Vec<_> = named()
                    .map(|(file, bytes)| Keep { file, bytes, digest: Digest([0; 32]) })
                    .collect();
                let stream =
                    Stream::new(&manifest(&files.map(|(size, _)| size)), &have, &keep).unwrap();
                let expected = oracle(&files);
                assert_eq!(stream.len_bytes(), expected.len() as u64);
                for slot_bytes in [1, 3, 32, 33, 200] {
                    let mut walk = stream.walk();
                    let mut bytes = Vec::new();
                    for _ in 0..stream.chunks(slot_bytes) {
                        let mut room = slot_bytes;
                        while let Some(piece) = walk.next_piece(room) {
                            assert!((1..=room).contains(&piece.len()));
                            room -= piece.len();
                            let (file, first) = match piece {
                                Piece::Bytes { file, offset, len } => {
                                    assert!(offset + u64::from(len) <= files[file as usize].0);
                                    (file, offset)
                                }
                                Piece::Digest { file, offset, .. } => {
                                    (file, files[file as usize].0 + u64::from(offset))
                                }
                            };
                            bytes.extend((0..piece.len()).map(|n| (file, first + u64::from(n))));
                        }
                    }
                    assert_eq!(bytes, expected, "{files:?} {slot_bytes}");
                    assert_eq!(walk.next_piece(9), None);
                }
            }
        }
    }

    #[test]
    fn what_is_kept_must_be_there_and_named_in_order() {
        let files = manifest(&[4, 4]);
        let new = |have: &[Have], keep: &[(u32, u64)]| {
            let keep: Vec<_> = keep
                .iter()
                .map(|(file, bytes)| Keep { file: *file, bytes: *bytes, digest: Digest([0; 32]) })
                .collect();
            Stream::new(&files, have, &keep).map(|stream| stream.file_bytes())
        };
        assert_eq!(new(&[have(0, 3), have(1, 4)], &[(0, 3), (1, 4)]), Ok(1));
        assert_eq!(new(&[have(0, 3), have(1, 4)], &[]), Ok(8));
        let too_much = |bytes, at_most| Err(StreamError::TooMuch { file: 0, bytes, at_most });
        assert_eq!(new(&[have(0, 5)], &[]), too_much(5, 4));
        assert_eq!(new(&[have(0, 3)], &[(0, 2)]), too_much(2, 3));
        assert_eq!(new(&[], &[(0, 1)]), too_much(1, 0));
        assert_eq!(new(&[have(2, 0)], &[]), Err(StreamError::NoSuchFile { file: 2, files: 2 }));
        assert_eq!(new(&[have(1, 0), have(0, 0)], &[]), Err(StreamError::OutOfOrder(0)));
        assert_eq!(new(&[have(0, 1)], &[(0, 1), (0, 1)]), Err(StreamError::OutOfOrder(0)));
    }

    #[test]
    fn staging_areas_that_cannot_work_are_refused() {
        let good = Staging { slots: 64, slot_bytes: 1 << 20, page_bytes: 1 << 16 };
        assert_eq!(good.check(), Ok(good));
        assert_eq!((good.bytes(), good.pages(1), good.pages(65537)), (64 << 20, 1, 2));
        assert_eq!((good.slot(63), good.slot(64), good.first_page(2)), (63, 0, 32));
        for bad in [
            Staging { slots: 0, ..good },
            Staging { slots: 257, ..good },
            Staging { slot_bytes: 0, ..good },
            Staging { page_bytes: 0, ..good },
            Staging { page_bytes: 3, ..good },
            Staging { slots: 256, slot_bytes: 1 << 30, ..good },
        ] {
            assert_eq!(bad.check(), Err(StreamError::BadStaging(bad)));
        }
    }
}
