//! What callers ask for, in terms of regions, and the same in the core's terms.

use std::sync::Arc;

use immwire_core::id::PeerId;
use immwire_core::imm::ImmTag;
use immwire_core::plan::{self, PageList, Target, TargetList};
use immwire_core::region::MrDesc;

use crate::largest::largest;
use crate::region::Region;

/// One contiguous write.
#[derive(Debug, Clone, Copy)]
pub struct SingleWrite<'a> {
    /// Who it goes to.
    pub peer: PeerId,
    /// Where it comes from.
    pub src: &'a Region,
    /// First byte, from the start of `src`.
    pub src_offset: u64,
    /// Where it goes.
    pub dst: &'a MrDesc,
    /// First byte, from the start of `dst`.
    pub dst_offset: u64,
    /// Bytes.
    pub len: u64,
    /// The peer's counter that it counts for, as one write.
    pub imm: Option<ImmTag>,
}

/// Pages of equal size: page `i` lies at `offset + stride * indices[i]` of its region.
#[derive(Debug, Clone)]
pub struct Pages {
    /// Which pages, in the order in which the two sides correspond.
    pub indices: PageIndices,
    /// Bytes from one page to the next.
    pub stride: u64,
    /// Where page 0 lies.
    pub offset: u64,
}

/// Many pages, each to a place of its own.
#[derive(Debug, Clone)]
pub struct PagedWrite<'a> {
    /// Who they go to.
    pub peer: PeerId,
    /// Bytes of each page.
    pub page_bytes: u64,
    /// Where they come from.
    pub src: &'a Region,
    /// Which pages of `src`.
    pub src_pages: Pages,
    /// Where they go.
    pub dst: &'a MrDesc,
    /// Which pages of `dst`; as many as of `src`.
    pub dst_pages: Pages,
    /// The peer's counter that they count for, each page as one write.
    pub imm: Option<ImmTag>,
}

/// Parts of one region, each to a peer of its own.
#[derive(Debug, Clone)]
pub struct ScatterWrite<'a> {
    /// Where they come from.
    pub src: &'a Region,
    /// What goes where.
    pub targets: Arc<[Target]>,
    /// The counter, at every peer, that its part counts for.
    pub imm: Option<ImmTag>,
}

/// Page numbers, shared with the engine until the transfer has ended.
///
/// To make one looks at all numbers once; a write of them does not any more. So a list that several writes have, as of one request's
/// pages in each layer, is best made once and cloned, which costs a count.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PageIndices {
    numbers: Arc<[u32]>,
    /// Of these. Nobody can change them any more.
    largest: Option<u32>,
}

impl PageIndices {
    /// The numbers, in order.
    #[must_use]
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }
}

impl From<Arc<[u32]>> for PageIndices {
    fn from(numbers: Arc<[u32]>) -> Self {
        let largest = largest(&numbers);
        Self { numbers, largest }
    }
}

impl From<Vec<u32>> for PageIndices {
    fn from(numbers: Vec<u32>) -> Self {
        Arc::<[u32]>::from(numbers).into()
    }
}

impl From<&[u32]> for PageIndices {
    fn from(numbers: &[u32]) -> Self {
        Arc::<[u32]>::from(numbers).into()
    }
}

impl PageList for PageIndices {
    fn len(&self) -> usize {
        self.numbers.len()
    }

    #[inline]
    fn get(&self, i: usize) -> Option<u64> {
        self.numbers.get(i).copied().map(u64::from)
    }

    fn max(&self) -> Option<u64> {
        self.largest.map(u64::from)
    }

    #[inline]
    fn copy_to(&self, first: usize, out: &mut [u32]) -> Option<()> {
        PageList::copy_to(&&*self.numbers, first, out)
    }
}

/// A list of peers resolved once, for barriers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerGroup(pub(crate) Arc<[PeerId]>);

impl PeerGroup {
    /// The peers, in the order given.
    #[must_use]
    pub fn peers(&self) -> &[PeerId] {
        &self.0
    }
}

/// The targets of a scatter or a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Targets {
    Writes(Arc<[Target]>),
    Peers(Arc<[PeerId]>),
}

impl TargetList for Targets {
    fn len(&self) -> usize {
        match self {
            Self::Writes(targets) => targets.len(),
            Self::Peers(peers) => peers.len(),
        }
    }

    fn get(&self, i: usize) -> Option<Target> {
        match self {
            Self::Writes(targets) => targets.get(i).copied(),
            Self::Peers(_) => None,
        }
    }

    fn peer(&self, i: usize) -> Option<PeerId> {
        match self {
            Self::Writes(targets) => targets.get(i).map(|target| target.peer),
            Self::Peers(peers) => peers.get(i).copied(),
        }
    }
}

/// A request as the core plans it.
pub(crate) type Request = plan::Request<PageIndices, Targets>;
/// A request whose every range was found to lie inside its region.
pub(crate) type Checked = plan::Checked<PageIndices, Targets>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_knows_its_largest_number() {
        for (list, most) in
            [(&[][..], None), (&[7], Some(7)), (&[0, u32::MAX, 3], Some(u32::MAX.into()))]
        {
            let ways = [list.into(), list.to_vec().into(), Arc::<[u32]>::from(list).into()];
            for pages in ways {
                let pages: PageIndices = pages;
                assert_eq!((pages.numbers(), pages.max()), (list, most));
            }
        }
    }
}
