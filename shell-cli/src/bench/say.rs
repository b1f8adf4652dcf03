//! What the measuring process and its peer say to each other. JSON in two-sided messages, outside of
//! everything that is timed.

use super::mapping::Place;
use super::pattern;
use super::raw::{Done, Far};
use immwire::Region;
use serde::{Deserialize, Serialize};

/// To the peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Ask {
    /// Have memory and a counter. Answer: [`Answer::Prepared`].
    Prepare {
        /// Bytes of memory.
        bytes: u64,
        /// The counter's tag, where it is to be a certain one.
        tag: Option<u32>,
    },
    /// Check that so many writes have arrived and what they brought. Answer: [`Answer::Checked`].
    Check {
        /// Writes and pages since the last check.
        writes: u64,
        /// What was written.
        seed: u64,
        /// And where.
        layout: Layout,
    },
    /// Answer each write with one. [`Answer::Ready`] first; nothing after, unless it fails.
    Echo {
        /// Where to.
        region: String,
        /// The counter there.
        tag: u32,
        /// Bytes each way.
        bytes: u64,
        /// How often.
        turns: u64,
    },
    /// The same without the engine, over memory of the asker's. [`Answer::Ready`] first, [`Answer::Over`] last.
    BareEcho {
        /// The memory.
        place: Place,
        /// Bytes each way.
        bytes: u64,
        /// How often.
        turns: u64,
    },
    /// Have an endpoint of the transport's without an engine, over the memory that was prepared. Answer:
    /// [`Answer::Raw`].
    Raw {
        /// Address of the asker's.
        endpoint: Vec<u8>,
    },
    /// Take so many writes there. [`Answer::Ready`] first, [`Answer::Over`] last.
    RawTake {
        /// How many.
        writes: u64,
        /// The data of each.
        data: u64,
    },
    /// Answer each write there with one. [`Answer::Ready`] first, [`Answer::Over`] last.
    RawEcho {
        /// Where to.
        far: Far,
        /// Bytes each way, at least 8.
        bytes: u64,
        /// How often.
        turns: u64,
        /// The data of each.
        data: u64,
        /// When a write is done.
        done: Done,
    },
    /// Know these members, the asker among them, and have the two counters of these tags. Answer: [`Answer::Joined`].
    Join {
        /// Addresses; the own is left out.
        members: Vec<String>,
        /// As the asker has them.
        tags: [u32; 2],
    },
    /// Take part in so many barriers. [`Answer::Ready`] first.
    Barriers {
        /// How many.
        rounds: u64,
    },
}

/// From the peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum Answer {
    /// Memory and counter are there.
    Prepared {
        /// Descriptor of the memory.
        region: String,
        /// The counter's tag.
        tag: u32,
        /// The memory as a file, if it is one.
        place: Option<Place>,
    },
    /// What a check found: nothing, or what is wrong.
    Checked {
        /// What is wrong.
        wrong: Option<String>,
    },
    /// The endpoint without an engine is there.
    Raw {
        /// Where to write.
        far: Far,
    },
    /// Go on.
    Ready,
    /// A round of the baseline is over here, too.
    Over,
    /// A member of the barrier.
    Joined,
    /// It did not work.
    Failed {
        /// Why.
        reason: String,
    },
}

/// How the bytes of a pattern lie in the receiver's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Slots at the same distance as in the source, each with so many bytes.
    Slots {
        /// Where the first was in the source; a multiple of 8.
        from: u64,
        /// From one to the next; a multiple of 8.
        stride: u64,
        /// Bytes of each.
        bytes: u64,
        /// How many.
        slots: u32,
    },
    /// Pages in another order: see [`page_lists`].
    Shuffled {
        /// How many.
        pages: u32,
        /// Bytes of each; a multiple of 8.
        page_bytes: u64,
    },
}

/// Which page of the source goes to which page of the destination: two shuffles.
#[must_use]
pub fn page_lists(pages: u32) -> (Vec<u32>, Vec<u32>) {
    (pattern::shuffled(0xf00d, pages), pattern::shuffled(0xbeef, pages))
}

/// Bytes looked at, or made, at a time.
const PIECE: usize = 64 << 10;
/// Bytes made at a time for a GPU's memory, where each time costs some hundred microseconds.
const GPU_PIECE: usize = 8 << 20;

/// Fills the first `bytes` bytes of `region` with the pattern of `seed`; between pieces, `between` is called.
pub fn fill(region: &Region, seed: u64, bytes: u64, mut between: impl FnMut()) {
    let most = if region.place() == immwire::Place::Host { PIECE } else { GPU_PIECE };
    let most = most.min(usize::try_from(bytes).unwrap_or(most));
    let mut piece = vec![0; most];
    let mut at = 0;
    while at < bytes {
        let len = usize::try_from(bytes - at).unwrap_or(most).min(most);
        if let Some(piece) = piece.get_mut(..len) {
            pattern::fill(seed, at, piece);
            // What lies outside of the region is not filled, and will be found wrong.
            let _ = region.write(at, piece);
        }
        between();
        at += len as u64;
    }
}

impl Layout {
    /// Bytes from the region's first to the end of the last that was written.
    fn extent(self) -> u64 {
        match self {
            Self::Slots { stride, bytes, slots, .. } => {
                stride.saturating_mul(slots.saturating_sub(1).into()).saturating_add(bytes)
            }
            Self::Shuffled { pages, page_bytes } => u64::from(pages).saturating_mul(page_bytes),
        }
    }
}

/// What is wrong with the bytes in `region`; `None` if all are those of `seed` in `layout`.
///
/// Of a GPU's memory a copy is looked at: pieces of it are slow to read. Between pieces of the host's, `between` is
/// called.
#[must_use]
pub fn wrong(
    region: &Region,
    seed: u64,
    layout: Layout,
    mut between: impl FnMut(),
) -> Option<String> {
    if region.place() == immwire::Place::Host {
        let read = |at, piece: &mut [u8]| {
            between();
            region.read(at, piece).map_err(|error| error.to_string())
        };
        return wrong_in(region.len(), read, seed, layout);
    }
    let extent = layout.extent().min(region.len());
    let mut copy = vec![0; usize::try_from(extent).unwrap_or(usize::MAX)];
    match region.read(0, &mut copy) {
        Ok(()) => wrong_bytes(&copy, seed, layout),
        Err(error) => Some(error.to_string()),
    }
}

/// The same of bytes that are here.
#[must_use]
pub fn wrong_bytes(bytes: &[u8], seed: u64, layout: Layout) -> Option<String> {
    let read = |at: u64, piece: &mut [u8]| {
        let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
        let found = from.and_then(|from| from.get(..piece.len()));
        piece.copy_from_slice(found.ok_or_else(|| format!("byte {at} lies outside"))?);
        Ok(())
    };
    wrong_in(bytes.len() as u64, read, seed, layout)
}

fn wrong_in(
    len: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), String>,
    seed: u64,
    layout: Layout,
) -> Option<String> {
    match layout {
        Layout::Slots { from, stride, bytes, slots } => (0..slots).find_map(|slot| {
            let at = stride.saturating_mul(slot.into());
            wrong_range(&mut read, seed, at, from.saturating_add(at), bytes)
        }),
        Layout::Shuffled { pages, page_bytes } => {
            // Before lists are made of a number that came from outside.
            if u64::from(pages).saturating_mul(page_bytes.max(1)) > len {
                return Some(format!("{pages} pages of {page_bytes} bytes do not fit the memory"));
            }
            let (from, to) = page_lists(pages);
            from.iter().zip(&to).find_map(|(from, to)| {
                let at = |page: u32| u64::from(page).saturating_mul(page_bytes);
                wrong_range(&mut read, seed, at(*to), at(*from), page_bytes)
            })
        }
    }
}

fn wrong_range(
    read: &mut impl FnMut(u64, &mut [u8]) -> Result<(), String>,
    seed: u64,
    at: u64,
    from: u64,
    bytes: u64,
) -> Option<String> {
    let mut piece = vec![0; PIECE.min(usize::try_from(bytes).unwrap_or(PIECE))];
    let mut done = 0;
    while done < bytes {
        let len = usize::try_from(bytes - done).unwrap_or(PIECE).min(PIECE);
        let piece = piece.get_mut(..len)?;
        if let Err(error) = read(at.saturating_add(done), piece) {
            return Some(error);
        }
        if let Some(wrong) = pattern::first_wrong(seed, from.saturating_add(done), piece) {
            let at = at.saturating_add(done).saturating_add(wrong as u64);
            return Some(format!(
                "byte {at} of the receiver's memory is not the one that was sent"
            ));
        }
        done += len as u64;
    }
    None
}

/// Where a message of `bytes`, which are 8 at least, carries its turn: at its start and, if it has room for another 8
/// bytes, at its end.
pub fn marks(bytes: u64) -> impl Iterator<Item = u64> {
    [Some(0), bytes.checked_sub(8).filter(|at| *at >= 8)].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::motor::{Mode, Motor};

    #[test]
    fn a_region_is_right_when_filled_and_wrong_when_one_byte_is_not() {
        let motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Polled).unwrap();
        let bytes = 200_000;
        let region = motor.engine().alloc(bytes).unwrap();
        let bytes = bytes as u64;
        fill(&region, 9, bytes, || ());
        let all = Layout::Slots { from: 0, stride: 0, bytes, slots: 1 };
        assert_eq!(wrong(&region, 9, all, || ()), None);
        assert!(wrong(&region, 8, all, || ()).is_some());
        assert!(
            wrong(&region, 9, Layout::Slots { from: 8, stride: 0, bytes, slots: 1 }, || ())
                .is_some()
        );
        region.write(150_000, &[0, 0]).unwrap();
        assert!(wrong(&region, 9, all, || ()).unwrap().contains("byte 15000"));
        let parts = |bytes| Layout::Slots { from: 0, stride: 1000, bytes, slots: 150 };
        assert_eq!(
            wrong(&region, 9, parts(1000), || ()),
            None,
            "the wrong bytes are behind these slots"
        );
        region.write(149_999, &[0, 0]).unwrap();
        assert!(wrong(&region, 9, parts(1000), || ()).is_some());
        assert_eq!(wrong(&region, 9, parts(999), || ()), None, "and now between them");
        let beyond = Layout::Slots { from: 0, stride: 0, bytes: bytes + 1, slots: 1 };
        fill(&region, 9, bytes, || ());
        assert!(wrong(&region, 9, beyond, || ()).is_some());
    }

    #[test]
    fn marks_are_inside_and_apart() {
        for bytes in 8..200 {
            let all: Vec<_> = marks(bytes).collect();
            assert_eq!(all.len(), if bytes < 16 { 1 } else { 2 });
            assert!(all.iter().all(|at| at + 8 <= bytes));
            assert!(all.windows(2).all(|pair| pair[0] + 8 <= pair[1]));
        }
    }

    #[test]
    fn shuffled_pages_are_right_only_where_the_lists_say() {
        let motor = Motor::new(&immwire::Transport::Shm, 1, Mode::Polled).unwrap();
        let (pages, page_bytes) = (50, 4096);
        let [src, dst] = [(); 2].map(|()| motor.engine().alloc(50 * 4096).unwrap());
        fill(&src, 4, 50 * 4096, || ());
        let layout = Layout::Shuffled { pages, page_bytes };
        assert!(wrong(&dst, 4, layout, || ()).is_some());
        let (from, to) = page_lists(pages);
        let mut page = vec![0; 4096];
        for (from, to) in from.iter().zip(&to) {
            src.read(u64::from(*from) * page_bytes, &mut page).unwrap();
            dst.write(u64::from(*to) * page_bytes, &page).unwrap();
        }
        assert_eq!(wrong(&dst, 4, layout, || ()), None);
        assert!(wrong(&src, 4, layout, || ()).is_some());
        for (pages, page_bytes) in [(51, 4096), (u32::MAX, 8), (u32::MAX, 0)] {
            assert!(wrong(&dst, 4, Layout::Shuffled { pages, page_bytes }, || ()).is_some());
        }
    }
}
