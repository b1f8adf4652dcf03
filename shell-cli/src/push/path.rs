//! Names that came from another process, made safe to use below a folder.
//!
//! Pure text. What is on the disk (a symbolic link in the place of a folder) is the store's to check.
//!
//! # Invariants
//!
//! A [`RelPath`] that exists is relative, has no `.`, `..` or empty component, no NUL, no component too
//! long for a file system once [`PARTIAL_SUFFIX`] is appended, and none that ends with it. So joined to
//! a folder without symbolic links it cannot leave it, and no name stands for another's partial file.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Appended to a file's name while its bytes are still arriving.
pub const PARTIAL_SUFFIX: &str = ".immwire-partial";

/// Longest component, so that with the suffix it stays within the usual 255 bytes.
pub const COMPONENT_MAX: usize = 255 - PARTIAL_SUFFIX.len();

/// Longest path, in bytes.
pub const PATH_MAX: usize = 4095;

/// Most components: a limit on folders held open and on recursion elsewhere.
pub const DEPTH_MAX: usize = 128;

/// Why a name is refused. The sender's fault; nothing was touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The name is empty.
    #[error("empty name")]
    Empty,
    /// The name starts at the root.
    #[error("absolute name")]
    Absolute,
    /// A component is `.`, `..` or empty, so that the name would not be the path it looks like.
    #[error("component {0} is empty, \".\" or \"..\"")]
    NotPlain(usize),
    /// A component contains NUL.
    #[error("component {0} contains NUL")]
    Nul(usize),
    /// A component is too long.
    #[error("component {component} has {bytes} bytes of at most {COMPONENT_MAX}")]
    ComponentTooLong {
        /// Which.
        component: usize,
        /// How long.
        bytes: usize,
    },
    /// A component ends as unfinished files do.
    #[error("component {0} ends with \"{PARTIAL_SUFFIX}\", which unfinished files are named by")]
    Reserved(usize),
    /// The path is too long.
    #[error("{0} bytes of at most {PATH_MAX}")]
    TooLong(usize),
    /// There are too many components.
    #[error("more than {DEPTH_MAX} components")]
    TooDeep,
}

/// A checked relative path, its components joined by `/`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RelPath(String);

impl RelPath {
    /// Checks `path`.
    ///
    /// # Errors
    ///
    /// [`PathError`]: the first rule it breaks.
    pub fn new(path: impl Into<String>) -> Result<Self, PathError> {
        let path = path.into();
        if path.is_empty() {
            return Err(PathError::Empty);
        }
        if path.starts_with('/') {
            return Err(PathError::Absolute);
        }
        if path.len() > PATH_MAX {
            return Err(PathError::TooLong(path.len()));
        }
        for (component, name) in path.split('/').enumerate() {
            match name {
                _ if component >= DEPTH_MAX => return Err(PathError::TooDeep),
                "" | "." | ".." => return Err(PathError::NotPlain(component)),
                _ if name.contains('\0') => return Err(PathError::Nul(component)),
                _ if name.len() > COMPONENT_MAX => {
                    return Err(PathError::ComponentTooLong { component, bytes: name.len() });
                }
                _ if name.ends_with(PARTIAL_SUFFIX) => return Err(PathError::Reserved(component)),
                _ => {}
            }
        }
        Ok(Self(path))
    }

    /// The path as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Folders from the top, and the last component.
    pub fn split(&self) -> (impl Iterator<Item = &str>, &str) {
        let (folders, name) = self.0.rsplit_once('/').unwrap_or(("", &self.0));
        (folders.split('/').filter(|folder| !folder.is_empty()), name)
    }

    /// The path of the folder it is in; `None` at the top.
    #[must_use]
    pub fn parent(&self) -> Option<&str> {
        self.0.rsplit_once('/').map(|(parent, _)| parent)
    }
}

impl TryFrom<String> for RelPath {
    type Error = PathError;

    fn try_from(path: String) -> Result<Self, PathError> {
        Self::new(path)
    }
}

impl From<RelPath> for String {
    fn from(path: RelPath) -> Self {
        path.0
    }
}

/// Control characters are escaped: a name cannot drive the terminal that it is shown on.
impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_printable(&self.0, f)
    }
}

/// Text of another process, with its control characters escaped, and without its end where it is longer
/// than [`PRINTED_MAX`].
pub struct Printable<'a>(pub &'a str);

/// Characters that are shown of a text: more than any path has.
pub const PRINTED_MAX: usize = 8 << 10;

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(PRINTED_MAX) {
            None => write_printable(self.0, f),
            Some((end, _)) => {
                write_printable(self.0.get(..end).unwrap_or_default(), f)?;
                f.write_str("...")
            }
        }
    }
}

fn write_printable(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    // Also the marks that make right-to-left text, which can disguise a name.
    let harmful = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().try_for_each(|c| {
        if harmful(c) { write!(f, "{}", c.escape_unicode()) } else { write!(f, "{c}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::{Component, Path};

    #[test]
    fn every_short_text_over_the_harmful_letters_is_judged_as_std_would() {
        const LETTERS: [char; 5] = ['/', '.', 'a', '\0', '\\'];
        for length in 0..=6_u32 {
            for number in 0..5_usize.pow(length) {
                let text: String =
                    (0..length).map(|place| LETTERS[number / 5_usize.pow(place) % 5]).collect();
                // The oracle: std's components, which must be all plain, and rebuild the text.
                let components: Vec<_> = Path::new(&text).components().collect();
                let plain = components.iter().all(|part| matches!(part, Component::Normal(_)));
                let rebuilt = components.iter().map(|part| part.as_os_str().to_str().unwrap());
                let same = rebuilt.collect::<Vec<_>>().join("/") == text;
                let safe = plain && same && !text.is_empty() && !text.contains('\0');
                assert_eq!(RelPath::new(text.as_str()).is_ok(), safe, "{text:?}");
            }
        }
    }

    #[test]
    fn each_rule_has_its_error() {
        let long = "x".repeat(COMPONENT_MAX + 1);
        let cases = [
            ("", PathError::Empty),
            ("/etc/passwd", PathError::Absolute),
            ("a/../../b", PathError::NotPlain(1)),
            ("a//b", PathError::NotPlain(1)),
            ("a/", PathError::NotPlain(1)),
            ("a/b\0", PathError::Nul(1)),
            ("a.immwire-partial/b", PathError::Reserved(0)),
            (&long, PathError::ComponentTooLong { component: 0, bytes: COMPONENT_MAX + 1 }),
            (&"a/".repeat(2048), PathError::TooLong(4096)),
            (&vec!["a"; DEPTH_MAX + 1].join("/"), PathError::TooDeep),
        ];
        for (path, error) in cases {
            assert_eq!(RelPath::new(path), Err(error), "{path}");
        }
        assert!(RelPath::new("x".repeat(COMPONENT_MAX)).is_ok());
        assert!(RelPath::new(vec!["a"; DEPTH_MAX].join("/")).is_ok());
    }

    #[test]
    fn a_path_splits_into_folders_and_name() {
        for (path, folders, name) in [("a", vec![], "a"), ("a/b/c", vec!["a", "b"], "c")] {
            let path = RelPath::new(path).unwrap();
            let (found, last) = path.split();
            assert_eq!((found.collect::<Vec<_>>(), last), (folders, name));
        }
        assert_eq!(RelPath::new("a/b/c").unwrap().parent(), Some("a/b"));
        assert_eq!(RelPath::new("a").unwrap().parent(), None);
    }

    #[test]
    fn a_bad_name_does_not_come_in_through_json_either() {
        assert!(serde_json::from_str::<RelPath>(r#""../x""#).is_err());
        assert!(serde_json::from_str::<RelPath>(r#""x""#).is_ok());
    }

    #[test]
    fn names_are_shown_without_control_characters() {
        let path = RelPath::new("a\u{1b}[2Jb\u{202e}c").unwrap();
        assert_eq!(path.to_string(), "a\\u{1b}[2Jb\\u{202e}c");
    }

    #[test]
    fn a_text_without_end_is_cut_off() {
        for (letter, shown) in [("x", 1), ("é", 2), ("\u{1b}", 6)] {
            let text = Printable(&letter.repeat(PRINTED_MAX)).to_string();
            assert_eq!(text.len(), shown * PRINTED_MAX);
            let longer = Printable(&letter.repeat(PRINTED_MAX + 1)).to_string();
            assert_eq!(longer, text + "...");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_stays_below_its_folder(text in "[a./\\\\\u{0}-\u{7f}é]{0,40}") {
            if let Ok(path) = RelPath::new(text) {
                let joined = Path::new("/root/of/all").join(path.as_str());
                prop_assert!(joined.starts_with("/root/of/all"));
                prop_assert!(joined.components().all(|part| part != Component::ParentDir));
                prop_assert!(!path.to_string().chars().any(char::is_control));
            }
        }
    }
}
