//! Queues of transfers, linked through the transfers themselves: one pair of links for each NIC.
//!
//! A transfer stands in at most one queue of a NIC at a time: a lane of it, or the waiting line of a
//! peer. Pushing and taking out are O(1) and need no storage of their own.
//!
//! # Invariants
//!
//! An index is in a [`List`] exactly while its [`Place`] for that NIC says so; the module
//! [`super`] changes both together. Who is in no queue is [`Link::LOOSE`]. Enumerated against a vector model
//! below.

/// "No transfer": the index that no slot has.
pub(super) const NIL: u16 = u16::MAX;

/// The ends of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct List {
    head: u16,
    tail: u16,
}

impl List {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL };

    /// The first transfer in the queue.
    pub(super) fn first(&self) -> Option<u16> {
        (self.head != NIL).then_some(self.head)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.head == NIL
    }

    /// Whether at most one transfer is queued.
    pub(super) fn is_single(&self) -> bool {
        self.head == self.tail
    }

    /// Appends `index`, which is in no queue of this NIC.
    #[inline(always)]
    pub(super) fn push_back(&mut self, links: &mut impl Links, index: u16) {
        links.set(index, Link { prev: self.tail, next: NIL });
        if self.tail == NIL {
            self.head = index;
        } else {
            let before = links.get(self.tail);
            links.set(self.tail, Link { next: index, ..before });
        }
        self.tail = index;
    }

    /// Takes out the first, as [`List::remove`] does.
    #[inline(always)]
    pub(super) fn pop_front(&mut self, links: &mut impl Links) -> Option<u16> {
        let index = self.first()?;
        let Link { next, .. } = links.get(index);
        self.head = next;
        if next == NIL {
            self.tail = NIL;
        } else {
            let after = links.get(next);
            links.set(next, Link { prev: NIL, ..after });
        }
        links.set(index, Link::LOOSE);
        Some(index)
    }

    /// Takes out `index`, which is in this queue.
    pub(super) fn remove(&mut self, links: &mut impl Links, index: u16) {
        let Link { prev, next } = links.get(index);
        if prev == NIL {
            self.head = next;
        } else {
            let before = links.get(prev);
            links.set(prev, Link { next, ..before });
        }
        if next == NIL {
            self.tail = prev;
        } else {
            let after = links.get(next);
            links.set(next, Link { prev, ..after });
        }
        links.set(index, Link::LOOSE);
    }

    /// All of the queue, first to last.
    #[cfg(test)]
    pub(super) fn contents(&self, links: &impl Links) -> std::vec::Vec<u16> {
        let following = |&at: &u16| Some(links.get(at).next).filter(|&next| next != NIL);
        core::iter::successors(self.first(), following).collect()
    }
}

/// The ends of a queue that only its first ever leaves: nobody in it has links backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Line {
    head: u16,
    tail: u16,
}

impl Line {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL };

    /// The first in the queue.
    #[inline(always)]
    pub(super) fn first(&self) -> Option<u16> {
        (self.head != NIL).then_some(self.head)
    }

    /// Appends `index`, which is loose.
    #[inline(always)]
    pub(super) fn push_back(&mut self, links: &mut impl Links, index: u16) {
        if self.tail == NIL {
            self.head = index;
        } else {
            links.set(self.tail, Link { prev: NIL, next: index });
        }
        self.tail = index;
    }

    /// Puts `index`, which is loose, before all others.
    #[inline(always)]
    pub(super) fn push_front(&mut self, links: &mut impl Links, index: u16) {
        if self.tail == NIL {
            self.tail = index;
        } else {
            links.set(index, Link { prev: NIL, next: self.head });
        }
        self.head = index;
    }

    /// Takes out the first.
    #[inline(always)]
    pub(super) fn pop_front(&mut self, links: &mut impl Links) -> Option<u16> {
        let index = self.first()?;
        self.head = links.get(index).next;
        if self.head == NIL {
            self.tail = NIL;
        }
        links.set(index, Link::LOOSE);
        Some(index)
    }
}

/// A transfer's neighbours in the queue it stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Link {
    prev: u16,
    next: u16,
}

impl Link {
    pub(super) const LOOSE: Self = Self { prev: NIL, next: NIL };
}

/// Where the links of one NIC are kept.
pub(super) trait Links {
    /// The links of `index`; [`Link::LOOSE`] if there is no such transfer.
    fn get(&self, index: u16) -> Link;
    /// Replaces the links of `index`.
    fn set(&mut self, index: u16, link: Link);
}

/// Which queue of a NIC a transfer stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Place {
    /// None.
    Nowhere,
    /// Its lane: it may be posted next.
    Lane,
    /// Its lane, holding a credit of the peer in this slot: it was first in that peer's line.
    Granted(u16),
    /// The waiting line of the peer in this slot, whose credits are used up.
    Blocked(u16),
}

impl Place {
    /// Whose line it waits in.
    pub(super) const fn blocked(self) -> Option<u16> {
        match self {
            Self::Blocked(peer) => Some(peer),
            Self::Nowhere | Self::Lane | Self::Granted(_) => None,
        }
    }
}

/// What all of these are, if they are the same and there are any.
pub(super) fn sole_of(mut all: impl Iterator<Item = u16>) -> Option<u16> {
    let first = all.next()?;
    all.all(|other| other == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    impl Links for Vec<Link> {
        fn get(&self, index: u16) -> Link {
            self[usize::from(index)]
        }
        fn set(&mut self, index: u16, link: Link) {
            self[usize::from(index)] = link;
        }
    }

    /// Every sequence of nine pushes and pops over three transfers, against a vector.
    #[test]
    fn a_line_behaves_as_a_vector() {
        for program in 0..4_u32.pow(9) {
            let (mut line, mut links) = (Line::EMPTY, vec![Link::LOOSE; 3]);
            let (mut model, mut rest) = (Vec::new(), program);
            for _ in 0..9 {
                let index = u16::try_from(rest % 4).unwrap();
                rest /= 4;
                if index == 3 {
                    let first = (!model.is_empty()).then(|| model.remove(0));
                    assert_eq!(line.pop_front(&mut links), first, "program {program}");
                } else if !model.contains(&index) {
                    line.push_back(&mut links, index);
                    model.push(index);
                }
                assert_eq!(line.first(), model.first().copied());
                assert_eq!(line.tail, model.last().copied().unwrap_or(NIL));
                let loose = (0..3).filter(|index| !model.contains(index));
                assert!(loose.into_iter().all(|index| links.get(index) == Link::LOOSE));
            }
        }
    }

    /// Every sequence of eight pushes and removals over three transfers, against a vector.
    #[test]
    fn behaves_as_a_vector() {
        for program in 0..3_u32.pow(8) {
            let (mut list, mut links) = (List::EMPTY, vec![Link::LOOSE; 3]);
            let (mut model, mut rest) = (Vec::new(), program);
            for _ in 0..8 {
                let index = u16::try_from(rest % 3).unwrap();
                rest /= 3;
                if let Some(at) = model.iter().position(|&queued| queued == index) {
                    if at == 0 {
                        let (mut popped, mut left) = (list, links.clone());
                        assert_eq!(popped.pop_front(&mut left), Some(index));
                        list.remove(&mut links, index);
                        assert_eq!((popped, &left), (list, &links));
                    } else {
                        list.remove(&mut links, index);
                    }
                    model.remove(at);
                } else {
                    list.push_back(&mut links, index);
                    model.push(index);
                }
                assert_eq!(list.contents(&links), model, "program {program}");
                assert_eq!(list.first(), model.first().copied());
                assert_eq!(list.is_empty(), model.is_empty());
                assert_eq!(list.is_single(), model.len() < 2);
                assert_eq!(list.tail, model.last().copied().unwrap_or(NIL));
            }
        }
    }
}
