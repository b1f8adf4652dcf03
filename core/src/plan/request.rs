//! What a caller asks for, and the proof that all of it lies inside its regions.
//!
//! A [`Request`] is plain data that anybody may fill in; a [`Checked`] one is what can be planned. Nothing
//! here knows NICs, routes or how a transfer is cut.
//!
//! # Invariants
//!
//! Of a [`Checked`] request, every page and range lies inside its region, the destination may be written,
//! both page lists are equally long, and no address in it wraps.

use core::fmt;

use super::{PageRun, RunLayout};
use crate::id::PeerId;
use crate::imm::{Imm, ImmTag, MAX_MERGED};
use crate::mailbox::USER_COUNTERS;
use crate::region::{LocalMr, MrDesc, RegionError};

/// Page numbers that do not change while a plan refers to them.
///
/// The methods must agree with each other, always: a plan is checked by `max` and made by `get`, and whoever
/// posts a run of pages reads them by `copy_to`.
pub trait PageList {
    /// How many pages.
    fn len(&self) -> usize;
    /// Page number at `i`; `None` from `len` on.
    fn get(&self, i: usize) -> Option<u64>;
    /// The largest page number; `None` if there are no pages.
    fn max(&self) -> Option<u64>;
    /// Copies the page numbers from place `first` on into all of `out`; `None`, whatever `out` holds then, if
    /// there are fewer, or one of them has more than 32 bits. O(`out`).
    fn copy_to(&self, first: usize, out: &mut [u32]) -> Option<()> {
        for (i, number) in out.iter_mut().enumerate() {
            *number = u32::try_from(self.get(first.checked_add(i)?)?).ok()?;
        }
        Some(())
    }
    /// Whether there are no pages.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl PageList for &[u32] {
    fn len(&self) -> usize {
        <[u32]>::len(self)
    }
    fn get(&self, i: usize) -> Option<u64> {
        <[u32]>::get(self, i).copied().map(u64::from)
    }
    fn max(&self) -> Option<u64> {
        // A fold, unlike `Iterator::max`, becomes vector instructions.
        self.first().map(|first| self.iter().fold(*first, |max, page| max.max(*page)).into())
    }
    #[inline]
    fn copy_to(&self, first: usize, out: &mut [u32]) -> Option<()> {
        let from = <[u32]>::get(self, first..)?;
        out.copy_from_slice(from.get(..out.len())?);
        Some(())
    }
}

impl PageList for &[u64] {
    fn len(&self) -> usize {
        <[u64]>::len(self)
    }
    fn get(&self, i: usize) -> Option<u64> {
        <[u64]>::get(self, i).copied()
    }
    fn max(&self) -> Option<u64> {
        self.first().map(|first| self.iter().fold(*first, |max, page| max.max(*page)))
    }
}

/// One peer's part of a scatter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// Who receives.
    pub peer: PeerId,
    /// The peer's region.
    pub dst: MrDesc,
    /// Where the bytes lie, from the base of the source region.
    pub src_offset: u64,
    /// Where they go, from the base of `dst`.
    pub dst_offset: u64,
    /// How many.
    pub len: u64,
}

/// Targets, or only peers, that do not change while a plan refers to them.
pub trait TargetList {
    /// How many targets.
    fn len(&self) -> usize;
    /// Target `i`; `None` from `len` on, and always in a list of peers only.
    fn get(&self, i: usize) -> Option<Target>;
    /// The peer of target `i`; `None` from `len` on.
    fn peer(&self, i: usize) -> Option<PeerId> {
        self.get(i).map(|target| target.peer)
    }
    /// Whether there are no targets.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl TargetList for &[Target] {
    fn len(&self) -> usize {
        <[Target]>::len(self)
    }
    fn get(&self, i: usize) -> Option<Target> {
        <[Target]>::get(self, i).copied()
    }
    fn peer(&self, i: usize) -> Option<PeerId> {
        <[Target]>::get(self, i).map(|target| target.peer)
    }
}

/// Peers alone: enough for a [`Barrier`], refused by a [`ScatterWrite`].
impl TargetList for &[PeerId] {
    fn len(&self) -> usize {
        <[PeerId]>::len(self)
    }
    fn get(&self, _: usize) -> Option<Target> {
        None
    }
    fn peer(&self, i: usize) -> Option<PeerId> {
        <[PeerId]>::get(self, i).copied()
    }
}

/// One contiguous write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SingleWrite {
    /// Who receives.
    pub peer: PeerId,
    /// Region the bytes come from.
    pub src: LocalMr,
    /// Where in it they start.
    pub src_offset: u64,
    /// The peer's region.
    pub dst: MrDesc,
    /// Where in it they go.
    pub dst_offset: u64,
    /// How many; none with an immediate is an immediate alone, none without is nothing.
    pub len: u64,
    /// What the receiver counts one write at.
    pub imm: Option<ImmTag>,
}

impl SingleWrite {
    /// The same, with both regions where they are here.
    #[must_use]
    pub const fn by_ref(&self) -> SingleRef<'_> {
        let Self { peer, ref src, src_offset, ref dst, dst_offset, len, imm } = *self;
        SingleRef { peer, src, src_offset, dst, dst_offset, len, imm }
    }
}

/// A [`SingleWrite`] whose regions are looked at where they are, so that nobody who waits for a small write waits for
/// copies of two descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SingleRef<'a> {
    /// Who receives.
    pub peer: PeerId,
    /// Region the bytes come from.
    pub src: &'a LocalMr,
    /// Where in it they start.
    pub src_offset: u64,
    /// The peer's region.
    pub dst: &'a MrDesc,
    /// Where in it they go.
    pub dst_offset: u64,
    /// How many.
    pub len: u64,
    /// What the receiver counts one write at.
    pub imm: Option<ImmTag>,
}

/// Where pages lie in a region: page `i` at `offset + stride * indices[i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pages<P> {
    /// Page numbers.
    pub indices: P,
    /// Bytes from one page number to the next.
    pub stride: u64,
    /// Where page number 0 starts, from the base of the region.
    pub offset: u64,
}

/// Pages of equal size, each from its place to its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PagedWrite<P> {
    /// Who receives.
    pub peer: PeerId,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Region the pages come from.
    pub src: LocalMr,
    /// Where in it they lie.
    pub src_pages: Pages<P>,
    /// The peer's region.
    pub dst: MrDesc,
    /// Where in it they go.
    pub dst_pages: Pages<P>,
    /// What the receiver counts one write for each page at.
    pub imm: Option<ImmTag>,
}

/// A contiguous write to each of several peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScatterWrite<T> {
    /// Region the bytes come from.
    pub src: LocalMr,
    /// Who receives what.
    pub targets: T,
    /// What each receiver counts one write at.
    pub imm: Option<ImmTag>,
}

/// One immediate, without bytes, to each of several peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Barrier<T> {
    /// The peers.
    pub targets: T,
    /// What each of them counts one write at.
    pub imm: ImmTag,
}

/// One immediate without bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImmWrite {
    /// Who receives.
    pub peer: PeerId,
    /// Where it is counted.
    pub imm: ImmTag,
    /// For how many writes it counts: 1 to [`MAX_MERGED`].
    pub writes: u16,
}

/// One piece, never cut, into the region that the peer keeps for us since it connected; with the
/// immediate exactly as given. What messages, credits and heartbeats are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ControlWrite {
    /// Who receives.
    pub peer: PeerId,
    /// Where the bytes are; `None` for an immediate without bytes.
    pub src: Option<LocalMr>,
    /// First byte, from the start of `src`.
    pub src_offset: u64,
    /// First byte, from the start of the control region. Checked when the piece is made: a peer whose
    /// region is too small is sent nothing.
    pub dst_offset: u64,
    /// Bytes; no more than the port's largest message.
    pub len: u64,
    /// What the peer is told.
    pub imm: Imm,
}

/// What a caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request<P, T> {
    /// One contiguous write.
    Single(SingleWrite),
    /// Pages of equal size to one peer.
    Paged(PagedWrite<P>),
    /// A contiguous write to each of several peers.
    Scatter(ScatterWrite<T>),
    /// An immediate to each of several peers.
    Barrier(Barrier<T>),
    /// An immediate to one peer.
    Imm(ImmWrite),
    /// A write into the peer's control region.
    Control(ControlWrite),
}

/// Which end of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Ours.
    Source,
    /// The peer's.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Why a request was refused: the caller's mistake. Nothing was posted.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestError {
    /// The two page lists differ in length.
    PagesUnequal {
        /// Source pages.
        src: usize,
        /// Destination pages.
        dst: usize,
    },
    /// A page does not lie inside its region.
    PageOutOfRegion {
        /// Whose region.
        side: Side,
        /// Where in the list the page number stands; the first such.
        list_index: usize,
        /// The page number.
        page: u64,
        /// Bytes of a page.
        page_bytes: u64,
        /// Bytes the region has.
        region_len: u64,
    },
    /// A range does not lie inside its region, or the region may not be written.
    Region {
        /// Whose region.
        side: Side,
        /// Which target of a scatter; 0 for other requests.
        target: usize,
        /// What is wrong with it.
        error: RegionError,
    },
    /// More pages or targets than a transfer can have.
    TooMany {
        /// Pages or targets.
        len: usize,
        /// The most there may be.
        max: u32,
    },
    /// A list yields nothing at an index below its length.
    ListIncomplete {
        /// The index.
        list_index: usize,
    },
    /// An immediate can count for 1 to [`MAX_MERGED`] writes.
    Writes {
        /// Writes asked for.
        writes: u16,
    },
    /// The counters from [`USER_COUNTERS`] on are the engines' own.
    Reserved {
        /// The counter's slot.
        slot: u16,
    },
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PagesUnequal { src, dst } => {
                write!(f, "{src} source pages for {dst} destination pages")
            }
            Self::PageOutOfRegion { side, list_index, page, page_bytes, region_len } => write!(
                f,
                "{side} page {page} of {page_bytes} bytes, number {list_index} in its list, does not \
                 fit a region of {region_len} bytes"
            ),
            Self::Region { side, target, error } => write!(f, "{side} of target {target}: {error}"),
            Self::TooMany { len, max } => write!(f, "{len} pages or targets, at most {max} fit"),
            Self::ListIncomplete { list_index } => {
                write!(f, "a list has no entry at index {list_index} below its length")
            }
            Self::Writes { writes } => {
                write!(f, "an immediate for {writes} writes, 1 to {MAX_MERGED} are possible")
            }
            Self::Reserved { slot } => {
                write!(
                    f,
                    "counter {slot} is the engines' own: those below {USER_COUNTERS} are counters of users"
                )
            }
        }
    }
}

impl core::error::Error for RequestError {}

/// The most pages or targets of one request.
pub const MAX_ITEMS: u32 = 1 << 31;

/// A request all of which lies inside its regions, which may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Checked<P, T> {
    pub(super) request: Request<P, T>,
    pub(super) total_bytes: u64,
    /// The longest write, or page.
    pub(super) longest: u64,
    /// Pages or targets, at most [`MAX_ITEMS`]; 1 for other requests.
    pub(super) items: u32,
    /// It is of pages that may travel in runs: their numbers on both sides have at most 32 bits.
    pub(super) narrow: bool,
}

impl<P, T> Checked<P, T> {
    /// The same, but never planned as runs of pages: for a transport that takes those of some regions only.
    #[must_use]
    pub fn without_runs(mut self) -> Self {
        self.narrow = false;
        self
    }
}

impl<P: PageList, T: TargetList> Request<P, T> {
    /// Proves that the request can be planned. O(pages or targets).
    ///
    /// # Errors
    ///
    /// [`RequestError`]: something is out of bounds or out of range. Nothing was posted.
    #[inline]
    pub fn check(self) -> Result<Checked<P, T>, RequestError> {
        let items = self.items()?;
        if let Some(tag) = self.tag().filter(|tag| !tag.is_users()) {
            return Err(RequestError::Reserved { slot: tag.slot() });
        }
        let mut narrow = false;
        let (longest, total_bytes) = match &self {
            Self::Single(write) => {
                check_source(&write.src, write.src_offset, write.len, 0)?;
                check_destination(&write.dst, write.dst_offset, write.len, 0)?;
                (write.len, write.len)
            }
            Self::Paged(write) => {
                narrow = write.check()? <= u32::MAX.into();
                let total = u64::from(items).saturating_mul(write.page_bytes);
                (write.page_bytes, total)
            }
            Self::Scatter(write) => write.check()?,
            Self::Barrier(barrier) => {
                let missing = |i: &usize| barrier.targets.peer(*i).is_none();
                if let Some(list_index) = (0..barrier.targets.len()).find(missing) {
                    return Err(RequestError::ListIncomplete { list_index });
                }
                (0, 0)
            }
            Self::Control(write) => {
                match &write.src {
                    Some(src) => check_source(src, write.src_offset, write.len, 0)?,
                    None if write.len == 0 => 0,
                    None => {
                        let error = RegionError::OutOfBounds {
                            offset: write.src_offset,
                            len: write.len,
                            region_len: 0,
                        };
                        return Err(RequestError::Region { side: Side::Source, target: 0, error });
                    }
                };
                (write.len, write.len)
            }
            Self::Imm(write) if (1..=MAX_MERGED).contains(&write.writes) => (0, 0),
            Self::Imm(write) => {
                let writes = write.writes;
                return Err(RequestError::Writes { writes });
            }
        };
        Ok(Checked { request: self, total_bytes, longest, items, narrow })
    }

    /// What is to count at the peers, but for what engines say to each other.
    const fn tag(&self) -> Option<ImmTag> {
        match self {
            Self::Single(write) => write.imm,
            Self::Paged(write) => write.imm,
            Self::Scatter(write) => write.imm,
            Self::Barrier(barrier) => Some(barrier.imm),
            Self::Imm(write) => Some(write.imm),
            Self::Control(_) => None,
        }
    }

    /// How many pages or targets.
    fn items(&self) -> Result<u32, RequestError> {
        let len = match self {
            Self::Single(_) | Self::Imm(_) | Self::Control(_) => 1,
            Self::Paged(write) => write.src_pages.indices.len(),
            Self::Scatter(write) => write.targets.len(),
            Self::Barrier(barrier) => barrier.targets.len(),
        };
        let max = MAX_ITEMS;
        let items = u32::try_from(len).ok().filter(|items| *items <= max);
        items.ok_or(RequestError::TooMany { len, max })
    }
}

impl<P, T> Checked<P, T> {
    /// The request.
    #[must_use]
    pub const fn request(&self) -> &Request<P, T> {
        &self.request
    }

    /// Bytes it moves, over all targets and pages; [`u64::MAX`] if more than that.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

fn check_source(mr: &LocalMr, offset: u64, len: u64, target: usize) -> Result<u64, RequestError> {
    let refused = |error| RequestError::Region { side: Side::Source, target, error };
    mr.range(offset, len).map_err(refused)
}

fn check_destination(
    mr: &MrDesc,
    offset: u64,
    len: u64,
    target: usize,
) -> Result<u64, RequestError> {
    let refused = |error| RequestError::Region { side: Side::Destination, target, error };
    mr.range(offset, len).map_err(refused)
}

impl<P: PageList> Pages<P> {
    /// Where page number `page` starts, from the base of the region.
    fn offset_of(&self, page: u64) -> Option<u64> {
        self.stride.checked_mul(page)?.checked_add(self.offset)
    }

    /// Address of the page at `i`, in a region at `base`.
    fn address(&self, base: u64, i: usize) -> Option<u64> {
        // Nothing wraps: the largest page number was checked, and addresses grow with the number.
        let offset = self.stride.wrapping_mul(self.indices.get(i)?).wrapping_add(self.offset);
        Some(base.wrapping_add(offset))
    }

    /// The largest page number, or else the place in the list, and the number, of the first page that `fits`
    /// refuses.
    ///
    /// `fits` refuses every page after one that it refuses.
    fn largest(&self, fits: impl Fn(u64) -> bool) -> Result<u64, (usize, u64)> {
        let len = self.indices.len();
        if len == 0 {
            return Ok(0);
        }
        let fits = |page: u64| self.offset_of(page).is_some_and(&fits);
        // A list that has no largest page is refused as if that page did not fit.
        let max = self.indices.max().unwrap_or(u64::MAX);
        if fits(max) {
            return Ok(max); // And so does every page before it.
        }
        let pages = (0..len).filter_map(|i| Some((i, self.indices.get(i)?)));
        let first = pages.into_iter().find(|(_, page)| !fits(*page));
        Err(first.unwrap_or((len, max)))
    }
}

impl<P: PageList> PagedWrite<P> {
    /// The largest page number of both sides.
    fn check(&self) -> Result<u64, RequestError> {
        let (src, dst) = (self.src_pages.indices.len(), self.dst_pages.indices.len());
        if src != dst {
            return Err(RequestError::PagesUnequal { src, dst });
        }
        check_destination(&self.dst, 0, 0, 0)?;
        let page_bytes = self.page_bytes;
        let refused = |side, (list_index, page), region_len| RequestError::PageOutOfRegion {
            side,
            list_index,
            page,
            page_bytes,
            region_len,
        };
        let in_src = |at| self.src.range(at, page_bytes).is_ok();
        let src_misfit = |misfit| refused(Side::Source, misfit, self.src.len);
        let src_max = self.src_pages.largest(in_src).map_err(src_misfit)?;
        let in_dst = |at| self.dst.range(at, page_bytes).is_ok();
        let dst_misfit = |misfit| refused(Side::Destination, misfit, self.dst.len);
        let dst_max = self.dst_pages.largest(in_dst).map_err(dst_misfit)?;
        Ok(src_max.max(dst_max))
    }

    /// Addresses of page `i` on both sides, in constant time.
    pub(super) fn page(&self, i: u64) -> Option<(u64, u64)> {
        let i = usize::try_from(i).ok()?;
        let src = self.src_pages.address(self.src.base, i)?;
        Some((src, self.dst_pages.address(self.dst.base, i)?))
    }

    /// Addresses of page number 0 on both sides. No page need lie there; every page lies behind.
    pub(super) const fn origin(&self) -> (u64, u64) {
        let src = self.src.base.wrapping_add(self.src_pages.offset);
        (src, self.dst.base.wrapping_add(self.dst_pages.offset))
    }

    /// See [`super::Plan::page_run`].
    pub(super) fn run(&self, run: PageRun, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout> {
        let (first, count) = (usize::try_from(run.first).ok()?, usize::try_from(run.count).ok()?);
        if count == 0 {
            return None;
        }
        self.src_pages.indices.copy_to(first, src.get_mut(..count)?)?;
        self.dst_pages.indices.copy_to(first, dst.get_mut(..count)?)?;
        let (src_base, dst_base) = self.origin();
        let (src_stride, dst_stride) = (self.src_pages.stride, self.dst_pages.stride);
        Some(RunLayout { src_base, src_stride, dst_base, dst_stride, page_bytes: self.page_bytes })
    }
}

impl<T: TargetList> ScatterWrite<T> {
    /// The longest write, and all together.
    fn check(&self) -> Result<(u64, u64), RequestError> {
        let (mut longest, mut total) = (0, 0_u64);
        for index in 0..self.targets.len() {
            let Some(target) = self.targets.get(index) else {
                return Err(RequestError::ListIncomplete { list_index: index });
            };
            check_source(&self.src, target.src_offset, target.len, index)?;
            check_destination(&target.dst, target.dst_offset, target.len, index)?;
            longest = target.len.max(longest);
            total = total.saturating_add(target.len);
        }
        Ok((longest, total))
    }
}
