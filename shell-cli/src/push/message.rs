//! What sender and receiver say to each other, and how it is cut into two-sided messages.
//!
//! JSON, because there are few messages and a person may want to read them; data never travels this
//! way. The engine delivers messages of one peer in order, so a fragment needs one byte in front: 0,
//! more follows; 1, the last. Everything is checked when read: a peer may be hostile.
//!
//! ```text
//! sender                                   receiver
//!   Offer: what there is             ──▶
//!                                    ◀──   Accept: staging area, what is here already
//!   Begin: what of it is right, with ──▶
//!     what only its bytes tell
//!   (bytes by paged writes)          ══▶   (credit by counter: a slot is free again)
//!                                    ◀──   Done
//! ```
//! Either side may say `Working` while its disk is at work, and `Failed` instead of anything.

use super::manifest::{ENTRIES_MAX, Entry};
use super::stream::Staging;
use serde::de::{DeserializeOwned, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::marker::PhantomData;

/// Version of what is said here; peers of another are refused by name.
pub const VERSION: u32 = 2;

/// The longest message, put together.
pub const MESSAGE_MAX: usize = 256 << 20;

/// A BLAKE3 digest in hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl TryFrom<String> for Digest {
    type Error = blake3::HexError;

    fn try_from(hex: String) -> Result<Self, Self::Error> {
        Ok(Self(*blake3::Hash::from_hex(hex)?.as_bytes()))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        blake3::Hash::from(digest.0).to_string()
    }
}

impl Digest {
    /// What a receiver says of bytes that it has: whoever has them too can tell, and nobody learns the digest.
    #[must_use]
    pub fn had(self) -> Self {
        Self(blake3::derive_key("immwire push 2026-11 have", &self.0))
    }

    /// What a sender says of bytes that are to be kept. It does not follow from [`had`](Self::had): who says it knows them.
    #[must_use]
    pub fn kept(self) -> Self {
        Self(blake3::derive_key("immwire push 2026-11 keep", &self.0))
    }
}

/// From the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromSender {
    /// What there is to send.
    Offer {
        /// [`VERSION`].
        version: u32,
        /// The immediate tag by which the receiver gives slots back, as bits.
        credit_tag: u32,
        /// Files and folders.
        entries: Vec<Entry>,
    },
    /// Answer to `Accept`: which of the bytes there are right. Files not named start at 0.
    Begin {
        /// One for each file of which anything is kept.
        keep: Vec<Keep>,
    },
    /// Still here, reading.
    Working,
    /// It is over.
    Failed {
        /// Why, for a person.
        reason: String,
    },
}

/// From the receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromReceiver {
    /// Ready.
    Accept {
        /// Descriptor of the staging area, as the engine encodes it, in hexadecimal.
        region: String,
        /// How the area is divided.
        staging: Staging,
        /// For each slot the tag its pages carry, as bits.
        slot_tags: Vec<u32>,
        /// What is here already.
        have: Vec<Have>,
    },
    /// Still here, reading or writing.
    Working,
    /// All files are complete and checked.
    Done,
    /// It is over.
    Failed {
        /// Why, for a person.
        reason: String,
    },
}

/// All fields of what a sender says, as they are read: one after the other into their places, what is not
/// known into none. A derived reader of an enum with a tag keeps everything until it has seen the tag, in
/// sixteen times the memory.
#[derive(Deserialize)]
struct SenderFields {
    say: SenderSays,
    version: Option<u32>,
    credit_tag: Option<u32>,
    entries: Option<Few<Entry, ENTRIES_MAX>>,
    keep: Option<Few<Keep, ENTRIES_MAX>>,
    reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum SenderSays {
    Offer,
    Begin,
    Working,
    Failed,
}

impl<'de> Deserialize<'de> for FromSender {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = SenderFields::deserialize(from)?;
        Ok(match fields.say {
            SenderSays::Offer => Self::Offer {
                version: there(fields.version, "version")?,
                credit_tag: there(fields.credit_tag, "credit_tag")?,
                entries: there(fields.entries, "entries")?.0,
            },
            SenderSays::Begin => Self::Begin { keep: there(fields.keep, "keep")?.0 },
            SenderSays::Working => Self::Working,
            SenderSays::Failed => Self::Failed { reason: there(fields.reason, "reason")? },
        })
    }
}

/// All fields of what a receiver says, as [`SenderFields`].
#[derive(Deserialize)]
struct ReceiverFields {
    say: ReceiverSays,
    region: Option<String>,
    staging: Option<Staging>,
    slot_tags: Option<Few<u32, { Staging::SLOTS_MAX as usize }>>,
    have: Option<Few<Have, ENTRIES_MAX>>,
    reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ReceiverSays {
    Accept,
    Working,
    Done,
    Failed,
}

impl<'de> Deserialize<'de> for FromReceiver {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = ReceiverFields::deserialize(from)?;
        Ok(match fields.say {
            ReceiverSays::Accept => Self::Accept {
                region: there(fields.region, "region")?,
                staging: there(fields.staging, "staging")?,
                slot_tags: there(fields.slot_tags, "slot_tags")?.0,
                have: there(fields.have, "have")?.0,
            },
            ReceiverSays::Working => Self::Working,
            ReceiverSays::Done => Self::Done,
            ReceiverSays::Failed => Self::Failed { reason: there(fields.reason, "reason")? },
        })
    }
}

/// A list of at most `MAX`: what is longer is refused where it gets too long, not when all of it is there.
struct Few<T, const MAX: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Few<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Reader<T, MAX> {
            type Value = Few<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut few = Vec::new();
                while let Some(next) = list.next_element()? {
                    if few.len() == MAX {
                        return Err(A::Error::invalid_length(MAX + 1, &self));
                    }
                    few.push(next);
                }
                Ok(Few(few))
            }
        }
        from.deserialize_seq(Reader(PhantomData))
    }
}

fn there<T, E: serde::de::Error>(field: Option<T>, name: &'static str) -> Result<T, E> {
    field.ok_or_else(|| E::missing_field(name))
}

/// A file of which the receiver has something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Have {
    /// Number among the offer's files, in path order.
    pub file: u32,
    /// Its first so many bytes are here.
    pub bytes: u64,
    /// And have a digest of which this is [`Digest::had`].
    pub digest: Digest,
}

/// A file of which the receiver may keep what it has: the `bytes` it named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// Number among the offer's files, in path order.
    pub file: u32,
    /// How much.
    pub bytes: u64,
    /// [`Digest::kept`] of these bytes' digest: nothing of a file is touched for whoever does not know them.
    pub digest: Digest,
}

/// Why what a peer sent is not a message. The peer's fault.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// A fragment is empty or starts with neither 0 nor 1.
    #[error("a message fragment that starts with {0:?}")]
    BadFragment(Option<u8>),
    /// The fragments add up to too much.
    #[error("a message of more than {MESSAGE_MAX} bytes")]
    TooLong,
    /// The beginnings of messages of several peers add up to too much; this one's was the longest.
    #[error("a message that is too long beside those of others; try again later")]
    Crowded,
    /// The text is not what was expected.
    #[error("not a message of this protocol: {0}")]
    NotAMessage(#[from] serde_json::Error),
}

const MORE: u8 = 0;
const LAST: u8 = 1;

/// `message` as fragments of at most `fragment_max` bytes (at least 2), to be sent in order.
///
/// # Errors
///
/// [`MessageError`]: it is too long to be accepted.
pub fn fragments<M: Serialize>(
    message: &M,
    fragment_max: usize,
) -> Result<Vec<Vec<u8>>, MessageError> {
    let text = serde_json::to_vec(message)?;
    if text.len() > MESSAGE_MAX {
        return Err(MessageError::TooLong);
    }
    let room = fragment_max.max(2) - 1;
    let count = text.len().div_ceil(room);
    let fragment = |(number, part): (usize, &[u8])| {
        let mark = if number + 1 == count { LAST } else { MORE };
        [&[mark], part].concat()
    };
    Ok(text.chunks(room).enumerate().map(fragment).collect())
}

/// Puts the fragments of one peer together again.
#[derive(Debug, Default)]
pub struct Assembler {
    text: Vec<u8>,
    /// What is left of the message that has begun is of no interest.
    skips: bool,
}

impl Assembler {
    /// Takes a fragment; returns the message it completes, if it does.
    ///
    /// # Errors
    ///
    /// [`MessageError`]; what was there so far is forgotten.
    pub fn take<M: DeserializeOwned>(
        &mut self,
        fragment: &[u8],
    ) -> Result<Option<M>, MessageError> {
        let (last, part) = match fragment {
            [MORE, part @ ..] => (false, part),
            [LAST, part @ ..] => (true, part),
            _ => {
                *self = Self::default();
                return Err(MessageError::BadFragment(fragment.first().copied()));
            }
        };
        if self.skips {
            self.skips = !last;
            return Ok(None);
        }
        if part.len() > MESSAGE_MAX - self.text.len() {
            self.text = Vec::new();
            return Err(MessageError::TooLong);
        }
        self.text.extend_from_slice(part);
        if !last {
            return Ok(None);
        }
        let text = std::mem::take(&mut self.text);
        Ok(Some(serde_json::from_slice(&text)?))
    }

    /// Takes a fragment of somebody who is not to be heard out, and keeps nothing: not of its message
    /// so far, nor of the rest. Returns whether that is new: once for each message.
    pub fn refuse(&mut self, fragment: &[u8]) -> bool {
        let new = !self.skips;
        self.text = Vec::new();
        // Nonsense is all of a message.
        self.skips = matches!(fragment, [MORE, ..]);
        new
    }

    /// Bytes of the message so far.
    #[must_use]
    pub fn held(&self) -> usize {
        self.text.len()
    }

    /// Forgets the message so far, and what is left of it when that comes.
    pub fn forget(&mut self) {
        *self = Self { text: Vec::new(), skips: true };
    }
}

/// Bytes in hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |value: u8| char::from(*DIGITS.get(usize::from(value)).unwrap_or(&b'?'));
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Bytes from hexadecimal; `None` if it is not that.
#[must_use]
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits?;
    let pairs = digits.chunks_exact(2);
    pairs
        .remainder()
        .is_empty()
        .then(|| pairs.map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn failed(reason: &str) -> FromSender {
        FromSender::Failed { reason: reason.to_owned() }
    }

    #[test]
    fn a_message_survives_every_fragment_size() {
        let message = failed("the disk is on fire");
        let whole = serde_json::to_vec(&message).unwrap().len();
        for fragment_max in 0..whole + 4 {
            let parts = fragments(&message, fragment_max).unwrap();
            assert!(parts.iter().all(|part| part.len() <= fragment_max.max(2)));
            let mut assembler = Assembler::default();
            for (number, part) in parts.iter().enumerate() {
                let got: Option<FromSender> = assembler.take(part).unwrap();
                let expected = (number + 1 == parts.len()).then(|| message.clone());
                assert_eq!(got, expected, "{fragment_max}");
            }
        }
    }

    #[test]
    fn nonsense_is_refused_and_forgotten() {
        let mut assembler = Assembler::default();
        assert!(assembler.take::<FromSender>(&[0, b'{']).unwrap().is_none());
        for bad in [&[][..], &[2, 3], &[255]] {
            assert!(matches!(assembler.take::<FromSender>(bad), Err(MessageError::BadFragment(_))));
        }
        assert!(matches!(
            assembler.take::<FromSender>(b"\x01{}"),
            Err(MessageError::NotAMessage(_))
        ));
        let good = fragments(&failed("x"), 4096).unwrap();
        assert_eq!(assembler.take(&good[0]).unwrap(), Some(failed("x")));
    }

    #[test]
    fn every_message_is_read_as_it_was_written() {
        use super::super::path::RelPath;
        let path = RelPath::new("a/b").unwrap();
        let entry = Entry { path, size: Some(1), mode: 0o640, mtime_s: -1, mtime_ns: 7 };
        let reason = || "no".to_owned();
        let keep = vec![Keep { file: 3, bytes: 4, digest: Digest([8; 32]) }];
        let have = vec![Have { file: 3, bytes: 4, digest: Digest([9; 32]) }];
        let sender = [
            FromSender::Offer { version: 1, credit_tag: 2, entries: vec![entry] },
            FromSender::Begin { keep },
            FromSender::Working,
            failed("no"),
        ];
        let staging = super::super::recv::STAGING;
        let region = "00ff".to_owned();
        let receiver = [
            FromReceiver::Accept { region, staging, slot_tags: vec![1, 2], have },
            FromReceiver::Working,
            FromReceiver::Done,
            FromReceiver::Failed { reason: reason() },
        ];
        for message in &sender {
            let text = serde_json::to_string(message).unwrap();
            assert_eq!(&serde_json::from_str::<FromSender>(&text).unwrap(), message);
            // The tag may stand anywhere, and whatever else there is does not count.
            let more = text.replacen("{\"say\":", "{\"more\":[{}],\"say\":", 1);
            assert_eq!(&serde_json::from_str::<FromSender>(&more).unwrap(), message);
        }
        for message in &receiver {
            let text = serde_json::to_string(message).unwrap();
            assert_eq!(&serde_json::from_str::<FromReceiver>(&text).unwrap(), message);
            let more = text.replacen("{\"say\":", "{\"more\":[{}],\"say\":", 1);
            assert_eq!(&serde_json::from_str::<FromReceiver>(&more).unwrap(), message);
        }
        for (text, why) in [
            (r#"{"say":"offer","version":1,"credit_tag":0}"#, "missing field `entries`"),
            (r#"{"say":"begin"}"#, "missing field `keep`"),
            (r#"{"say":"failed","keep":[]}"#, "missing field `reason`"),
            (r#"{"say":"begin","keep":null}"#, "missing field `keep`"),
            (r#"{"keep":[]}"#, "missing field `say`"),
            (r#"{"say":"begin","keep":[],"keep":[]}"#, "duplicate field `keep`"),
            (r#"{"say":"done"}"#, "unknown variant `done`"),
            ("[]", "invalid length 0"),
        ] {
            let error = serde_json::from_str::<FromSender>(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_refused() {
        let tags = |count| {
            let (region, staging) = (String::new(), super::super::recv::STAGING);
            let accept =
                FromReceiver::Accept { region, staging, slot_tags: vec![7; count], have: vec![] };
            let text = serde_json::to_vec(&accept).unwrap();
            Assembler::default().take::<FromReceiver>(&[&[LAST], &text[..]].concat())
        };
        assert!(tags(256).unwrap().is_some());
        let error = tags(257).unwrap_err().to_string();
        assert!(error.contains("at most 256"), "{error}");
    }

    #[test]
    fn of_whoever_is_refused_nothing_is_kept_and_the_next_message_is_heard() {
        let good = fragments(&failed("x"), 8).unwrap();
        assert!(good.len() > 3);
        for first in 0..good.len() {
            let mut assembler = Assembler::default();
            for fragment in &good[..first] {
                assert!(assembler.take::<FromSender>(fragment).unwrap().is_none());
            }
            assert!(assembler.refuse(&good[first]));
            assert_eq!(assembler.held(), 0);
            for (number, fragment) in good[first + 1..].iter().enumerate() {
                // Whether or not it is refused still.
                if number % 2 == 0 {
                    assert!(!assembler.refuse(fragment));
                } else {
                    assert!(assembler.take::<FromSender>(fragment).unwrap().is_none());
                }
                assert_eq!(assembler.held(), 0);
            }
            let all: Vec<Option<FromSender>> =
                good.iter().map(|fragment| assembler.take(fragment).unwrap()).collect();
            assert_eq!(all.last().unwrap(), &Some(failed("x")));
        }
        let mut assembler = Assembler::default();
        assert!(assembler.refuse(&[7]) && assembler.refuse(&[]) && assembler.refuse(&[LAST]));
    }

    #[test]
    fn a_message_without_end_is_cut_off() {
        let mut assembler = Assembler::default();
        let part = [vec![MORE], vec![b' '; MESSAGE_MAX / 2]].concat();
        assert!(assembler.take::<FromSender>(&part).unwrap().is_none());
        assert!(assembler.take::<FromSender>(&part).unwrap().is_none());
        assert!(matches!(assembler.take::<FromSender>(&[MORE, b' ']), Err(MessageError::TooLong)));
        assert_eq!(assembler.text.capacity(), 0);
    }

    #[test]
    fn an_offer_with_a_hostile_path_is_not_a_message() {
        let offer = |path: &str| {
            format!(
                r#"{{"say":"offer","version":1,"credit_tag":0,"entries":[{{"path":"{path}","size":1,"mode":0,"mtime_s":0,"mtime_ns":0}}]}}"#
            )
        };
        let take = |path: &str| {
            Assembler::default().take::<FromSender>(&[&[LAST], offer(path).as_bytes()].concat())
        };
        assert!(take("good/name").unwrap().is_some());
        for bad in ["/etc/passwd", "../up", "a/../../b", ""] {
            assert!(take(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn hexadecimal_goes_both_ways(bytes: Vec<u8>, text in "[0-9a-g]{0,6}") {
            prop_assert_eq!(unhex(&hex(&bytes)), Some(bytes));
            let good = text.len() % 2 == 0 && !text.contains('g');
            prop_assert_eq!(unhex(&text).is_some(), good);
        }

        #[test]
        fn arbitrary_bytes_never_panic(parts: Vec<Vec<u8>>) {
            let mut assembler = Assembler::default();
            for part in parts {
                let _ = assembler.take::<FromReceiver>(&part);
            }
        }
    }
}
