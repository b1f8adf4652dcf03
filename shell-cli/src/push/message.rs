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
//!   Begin: what of it is right       ──▶
//!   (bytes by paged writes)          ══▶   (credit by counter: a slot is free again)
//!                                    ◀──   Done
//! ```
//! Either side may say `Working` while its disk is at work, and `Failed` instead of anything.

use super::manifest::Entry;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of what is said here; peers of another are refused by name.
pub const VERSION: u32 = 1;

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

/// From the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromReceiver {
    /// Ready.
    Accept {
        /// Descriptor of the staging area, as the engine encodes it, in hexadecimal.
        region: String,
        /// How the area is divided.
        staging: super::stream::Staging,
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

/// A file of which the receiver has something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Have {
    /// Number among the offer's files, in path order.
    pub file: u32,
    /// Its first so many bytes are here.
    pub bytes: u64,
    /// And have this digest.
    pub digest: Digest,
}

/// A file of which the receiver may keep what it has: the `bytes` it named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// Number among the offer's files, in path order.
    pub file: u32,
    /// How much.
    pub bytes: u64,
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
                self.text.clear();
                return Err(MessageError::BadFragment(fragment.first().copied()));
            }
        };
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
