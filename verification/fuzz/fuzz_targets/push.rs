//! What `push` and `recv` hear from each other: fragments, messages, manifests, what is to be resumed.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use immwire_cli::motor::{desc_of, desc_text};
use immwire_cli::push::manifest::{Entry, Manifest};
use immwire_cli::push::message::{
    Assembler, Digest, FromReceiver, FromSender, Have, Keep, VERSION, fragments, hex, unhex,
};
use immwire_cli::push::path::{COMPONENT_MAX, PARTIAL_SUFFIX, PATH_MAX, RelPath};
use immwire_cli::push::stream::{DIGEST_BYTES, Piece, Staging, Stream};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Pieces that one walk may have: a small room in a large stream would take for ever.
const PIECES_MAX: u64 = 2000;

fuzz_target!(|bytes: &[u8]| {
    // The first two bytes say how long fragments are, and what a chunk's room is; messages follow, a line
    // each.
    let [size, room, text @ ..] = bytes else { return };
    let (mut manifest, mut have, mut keep) = (None, Vec::new(), Vec::new());
    for line in text.split(|byte| *byte == b'\n') {
        match heard::<FromSender>(line, usize::from(*size)) {
            Some(FromSender::Offer { entries, .. }) => manifest = Some(offered(entries)),
            Some(FromSender::Begin { keep: named }) => keep = named,
            _ => {}
        }
        let accepted = heard::<FromReceiver>(line, usize::from(*size));
        if let Some(FromReceiver::Accept { region, staging, have: named, .. }) = accepted {
            have = named;
            staged(staging, u64::from(*size));
            if let Some(desc) = desc_of(&region) {
                assert_eq!(desc_text(&desc), region.to_ascii_lowercase());
            }
        }
        if let Some(bytes) = std::str::from_utf8(line).ok().and_then(unhex) {
            assert_eq!(hex(&bytes).as_bytes(), line.to_ascii_lowercase());
        }
    }
    if let Some(Some(manifest)) = manifest {
        resumed(&manifest, &have, &keep, u32::from(*room));
    }
    if let Ok(made) = Made::arbitrary(&mut Unstructured::new(bytes)) {
        made.check();
    }
});

/// What `bytes` say, in one fragment or in several; whatever is heard is said again.
fn heard<M: Serialize + DeserializeOwned + Clone + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    size: usize,
) -> Option<M> {
    let mut assembler = Assembler::default();
    // As it came: the first byte tells whether more follows. Whatever is wrong can be said.
    if let Err(error) = assembler.take::<M>(bytes) {
        assert!(!error.to_string().is_empty());
    }
    let mut assembler = Assembler::default();
    let message: M = assembler.take(&[&[1], bytes].concat()).ok().flatten()?;
    let parts = fragments(&message, size).expect("not too long");
    assert!(parts.iter().all(|part| part.len() <= size.max(2)));
    let (last, others) = parts.split_last().expect("a message has a fragment");
    for part in others {
        assert!(assembler.take::<M>(part).expect("a part").is_none());
    }
    assert_eq!(assembler.take(last).expect("all of it"), Some(message.clone()));
    Some(message)
}

/// A list that is accepted keeps its rules.
fn offered(entries: Vec<Entry>) -> Option<Manifest> {
    let offered = entries.clone();
    let manifest = Manifest::new(entries).ok()?;
    assert_eq!(manifest.entries().len(), offered.len());
    let total: u128 = offered.iter().map(|entry| u128::from(entry.size.unwrap_or(0))).sum();
    assert_eq!(u128::from(manifest.total_bytes()), total);
    assert!(i64::try_from(total).is_ok());
    let files: Vec<&str> = manifest.files().map(|(entry, _)| entry.path.as_str()).collect();
    for entry in manifest.entries() {
        let path = entry.path.as_str();
        safe(path);
        assert!(entry.mode <= 0o777 && entry.mtime_ns < 1_000_000_000);
        let inside =
            |file: &&str| path.strip_prefix(*file).is_some_and(|rest| rest.starts_with('/'));
        assert!(!files.iter().any(inside), "{path} lies in a file");
    }
    assert!(manifest.entries().windows(2).all(|two| two[0].path < two[1].path));
    assert_eq!(Manifest::new(manifest.entries().to_vec()).as_ref(), Ok(&manifest));
    Some(manifest)
}

/// A name that cannot leave the folder, nor stand for another's partial file.
fn safe(path: &str) {
    assert!(!path.is_empty() && path.len() <= PATH_MAX && !path.contains('\0'));
    for part in path.split('/') {
        assert!(!matches!(part, "" | "." | ".."), "{path:?}");
        assert!(part.len() <= COMPONENT_MAX && !part.ends_with(PARTIAL_SUFFIX), "{path:?}");
    }
    let joined = std::path::Path::new("/folder").join(path);
    assert!(joined.starts_with("/folder"));
    assert!(joined.components().all(|part| part != std::path::Component::ParentDir));
}

/// Every chunk lies in its slot, and every slot in the area.
fn staged(staging: Staging, chunk: u64) {
    let Ok(staging) = staging.check() else { return };
    let slot = staging.slot(chunk);
    assert!(slot < staging.slots);
    let pages = u64::from(staging.first_page(slot)) + u64::from(staging.pages(staging.slot_bytes));
    assert!(pages * u64::from(staging.page_bytes) <= staging.bytes());
    assert!(staging.bytes() <= Staging::BYTES_MAX);
}

/// The stream is every file from where it starts, and its digest, without gap or double.
fn resumed(manifest: &Manifest, have: &[Have], keep: &[Keep], room: u32) {
    let Ok(stream) = Stream::new(manifest, have, keep) else { return };
    let files: Vec<u64> = manifest.files().map(|(_, size)| size).collect();
    let mut expected = Vec::new();
    for (file, size) in (0_u32..).zip(&files) {
        let kept = keep.iter().find(|keep| keep.file == file).map_or(0, |keep| keep.bytes);
        let said = have.iter().find(|have| have.file == file).map(|have| have.bytes);
        let named = keep.iter().any(|keep| keep.file == file);
        assert!(kept <= *size && (!named || said == Some(kept)));
        // A file that is kept whole has no part; one of no bytes is whole if it is named.
        if !(named && kept == *size) {
            expected.push((file, kept, *size));
        }
        assert_eq!(stream.start(file).is_none(), named && kept == *size);
    }
    let len: u64 = expected.iter().map(|(_, kept, size)| size - kept + DIGEST_BYTES).sum();
    assert_eq!(stream.len_bytes(), len);
    let room = room + 1;
    assert_eq!(stream.chunks(room), len.div_ceil(room.into()));
    if len / u64::from(room) > PIECES_MAX {
        return;
    }
    let mut walk = stream.walk();
    for (file, kept, size) in expected {
        let mut at = kept;
        while at < size + DIGEST_BYTES {
            let piece = walk.next_piece(room).expect("more is to come");
            assert!((1..=room).contains(&piece.len()));
            match piece {
                Piece::Bytes { file: of, offset, len } => {
                    assert_eq!((of, offset), (file, at));
                    assert!(offset + u64::from(len) <= size);
                }
                Piece::Digest { file: of, offset, len } => {
                    assert_eq!((of, size + u64::from(offset)), (file, at));
                    assert!(u64::from(offset + len) <= DIGEST_BYTES);
                }
            }
            at += u64::from(piece.len());
        }
        assert_eq!(at, size + DIGEST_BYTES);
    }
    assert_eq!(walk.next_piece(room), None);
}

/// A component of a path.
#[derive(Debug, Arbitrary)]
enum Part {
    Name(u8),
    Any(String),
    Long(u16),
    Partial,
    Empty,
    Here,
    Up,
}

impl Part {
    fn text(&self) -> String {
        match self {
            Self::Name(name) => format!("name{}", name % 4),
            Self::Any(text) => text.clone(),
            Self::Long(len) => "n".repeat(usize::from(*len) % (2 * COMPONENT_MAX)),
            Self::Partial => format!("name{PARTIAL_SUFFIX}"),
            Self::Empty => String::new(),
            Self::Here => ".".to_owned(),
            Self::Up => "..".to_owned(),
        }
    }
}

/// What a fuzzer would not spell in JSON.
#[derive(Debug, Arbitrary)]
struct Made {
    files: Vec<(Vec<Part>, Option<u16>)>,
    far: Option<u64>,
    have: Vec<(u8, u16)>,
    keep: Vec<(u8, Option<u16>)>,
    room: u8,
    staging: (u16, u32, u32),
}

impl Made {
    fn check(&self) {
        let (slots, slot_bytes, page_bytes) = self.staging;
        for page_bytes in [page_bytes, slot_bytes / (page_bytes % 64 + 1)] {
            staged(Staging { slots: slots.into(), slot_bytes, page_bytes }, self.far.unwrap_or(0));
        }
        let entries: Vec<Entry> = self
            .files
            .iter()
            .filter_map(|(parts, size)| {
                let parts: Vec<String> = parts.iter().map(Part::text).collect();
                let path = RelPath::new(parts.join("/")).ok()?;
                safe(path.as_str());
                let size = size.map(|size| self.far.filter(|_| size == 7).unwrap_or(size.into()));
                Some(Entry { path, size, mode: 0o644, mtime_s: 0, mtime_ns: 0 })
            })
            .collect();
        let said = FromSender::Offer { version: VERSION, credit_tag: 0, entries: entries.clone() };
        let text = serde_json::to_vec(&said).expect("JSON");
        assert_eq!(heard::<FromSender>(&text, usize::from(self.room)), Some(said));
        let Some(manifest) = offered(entries) else { return };
        let digest = Digest([0; 32]);
        let have = |(file, bytes): &(u8, u16)| Have {
            file: u32::from(*file) % 9,
            bytes: u64::from(*bytes),
            digest,
        };
        let have: Vec<Have> = self.have.iter().map(have).collect();
        // Mostly what was named.
        let keep = |(file, bytes): &(u8, Option<u16>)| {
            let file = u32::from(*file) % 9;
            let named = have.iter().find(|have| have.file == file).map_or(0, |have| have.bytes);
            Keep { file, bytes: bytes.map_or(named, u64::from), digest }
        };
        let keep: Vec<Keep> = self.keep.iter().map(keep).collect();
        resumed(&manifest, &have, &keep, self.room.into());
    }
}
