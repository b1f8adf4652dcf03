//! The memory two engines share: one segment for each session, and how a mapping is made and undone.
//!
//! The initiator makes the segment, the acceptor checks and maps it. It has two halves, one for each
//! direction, laid out alike:
//!
//! | part | written by | what |
//! |---|---|---|
//! | control lines | one side each | hazard word, lanes in use, bounce positions, doorbell |
//! | credits | reader | a position for each lane |
//! | grants | reader | for each of the reader's regions: the key under which the writer may write |
//! | GPU hazard words | writer | for each of them: the key under which a GPU of the writer's is writing |
//! | lanes | writer | immediates, a ring for each pair of NICs |
//! | bounce ring | writer | bytes for memory that cannot be mapped |
//!
//! # Invariants
//!
//! - Every offset is computed from [`Geometry`] alone, never from what the segment holds; both sides
//!   compute the same. A segment whose size is not exactly [`Geometry::bytes`], or that could still be
//!   resized, is refused: no access faults because the peer truncated the file.
//! - Words are only accessed as atomics; the bounce ring only by raw copies into and out of memory
//!   that nobody else touches. The peer may change any byte at any time, so nothing read here is
//!   believed; the readers say what they check.
//! - Words that different sides write do not share a [`LINE`].
//! - A large mapping starts where a huge page could, at both ends. Regions are offered for huge pages; sessions are not, as few of their pages are
//!   ever touched.
//! - A mapping is unmapped when dropped, and not inherited by a forked child; but for memory of our own user's ([`Use::Own`]), who may
//!   have addresses of it in the child.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use immwire_core::lane::Entry;
use immwire_core::wake::Doorbell;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Two cache lines: processors fetch them in pairs.
const LINE: usize = 128;
/// Parts of the layout start at multiples of this, whatever the kernel's pages are: both sides compute the same.
const PAGE: usize = 4096;
const WORD: usize = 8;
const CONTROL_LINES: usize = 8;
/// Immediates under way in one lane.
pub(super) const LANE_ENTRIES: usize = 1024;
const LANE_BYTES: usize = LANE_ENTRIES * size_of::<Entry>();
/// Regions one engine may have at a time.
pub(super) const REGIONS_MAX: usize = 16_384;
/// Bytes of a bounce ring; a power of two.
pub(super) const BOUNCE_BYTES: usize = 1 << 20;
/// From this size on, regions are offered to the kernel for huge pages.
const HUGE_BYTES: usize = 2 << 20;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// What a mapping is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// A region of our own engine's. Its pages are the file's, so no fork moves them away from a device that has been given them.
    Own,
    /// A region of a peer's.
    Peers,
    /// The words and rings of one, most of which nobody ever touches.
    Session,
}

/// Memory mapped from a file that others may have mapped too.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; all access goes through raw pointers or
// atomics, whose users argue for themselves.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out an address and a length.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `file`, readable and writable.
    pub(super) fn new(file: impl AsFd, bytes: usize, what: Use) -> Result<Self, Errno> {
        let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let base = if bytes >= HUGE_BYTES {
            let at = reserve_aligned(bytes)?;
            // SAFETY: replaces a reservation of ours, of which no address was given out; if that fails,
            // the reservation is given back.
            unsafe {
                let mapped = rustix::mm::mmap(at, bytes, access, shared | MapFlags::FIXED, file, 0);
                if mapped.is_err() {
                    let _ = rustix::mm::munmap(at, bytes);
                }
                mapped?
            }
        } else {
            // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no Rust object.
            unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, shared, file, 0)? }
        };
        let Some(base) = NonNull::new(base.cast()) else {
            return Err(Errno::NOMEM);
        };
        let mapping = Self { base, bytes };
        if what != Use::Own {
            mapping.advise(Advice::LinuxDontFork)?;
        }
        if bytes >= HUGE_BYTES && what != Use::Session {
            // Advice only: a kernel without huge pages for shared memory says no, and that is fine.
            let _ = mapping.advise(Advice::LinuxHugepage);
        }
        Ok(mapping)
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is a mapping of ours, and neither advice used here changes its contents.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, advice) }
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and whoever holds addresses into it holds `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// Reserves addresses for `bytes` bytes, aligned as huge pages are.
///
/// Both ends map a region so: pages that lie side by side in memory can then share entries of the
/// address translation in either mapping.
fn reserve_aligned(bytes: usize) -> Result<*mut core::ffi::c_void, Errno> {
    let Room { kept, space } = room(bytes, rustix::param::page_size()).ok_or(Errno::NOMEM)?;
    let none = ProtFlags::empty();
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no Rust object.
    let start = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        rustix::mm::mmap_anonymous(ptr::null_mut(), space, none, flags)?
    };
    let before = (start as usize).next_multiple_of(HUGE_BYTES) - start as usize;
    let at = start.wrapping_byte_add(before);
    // SAFETY: both are parts of the reservation, on either side of what is kept; lengths are multiples
    // of the kernel's page (`room`), as its addresses are.
    unsafe {
        if before > 0 {
            rustix::mm::munmap(start, before)?;
        }
        if before < HUGE_BYTES {
            rustix::mm::munmap(at.wrapping_byte_add(kept), HUGE_BYTES - before)?;
        }
    }
    Ok(at)
}

/// What is reserved so that a mapping fits in it wherever the reservation starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    /// What the mapping covers: whole pages.
    kept: usize,
    /// All of it.
    space: usize,
}

/// For `bytes` bytes in pages of `page` bytes, which the kernel says; `None` if no address space has it.
fn room(bytes: usize, page: usize) -> Option<Room> {
    let kept = bytes.checked_next_multiple_of(page)?;
    let space = kept.checked_add(HUGE_BYTES)?;
    Some(Room { kept, space })
}

/// Makes an anonymous file of `bytes` bytes that nobody can resize any more.
pub(super) fn sealed_file(name: &str, bytes: usize) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        made => made?,
    };
    rustix::fs::ftruncate(&file, u64::try_from(bytes).map_err(|_| Errno::FBIG)?)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Whether `file` is anonymous memory of at least `bytes` bytes that nobody can resize any more.
///
/// A mapping of anything else could fault under our hands, or block us in the kernel.
pub(super) fn is_sealed(file: impl AsFd, bytes: u64) -> bool {
    let seals = rustix::fs::fcntl_get_seals(&file);
    let (stat, system) = (rustix::fs::fstat(&file), rustix::fs::fstatfs(&file));
    let (Ok(seals), Ok(stat), Ok(system)) = (seals, stat, system) else {
        return false;
    };
    // Of huge pages that were set aside there may be none left when one is touched.
    system.f_type == libc::TMPFS_MAGIC
        && seals.contains(SEALS)
        && u64::try_from(stat.st_size).is_ok_and(|have| have >= bytes)
}

/// Which end of the session this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Initiator,
    Acceptor,
}

/// What the layout follows from: how many NICs each side has, 1 to 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) initiator_nics: u8,
    pub(super) acceptor_nics: u8,
}

impl Geometry {
    fn layout(self) -> Layout {
        let lanes = usize::from(self.initiator_nics) * usize::from(self.acceptor_nics);
        let grants_at = CREDITS_AT + lanes * LINE;
        let gpu_at = (grants_at + REGIONS_MAX * WORD).next_multiple_of(PAGE);
        let lanes_at = (gpu_at + REGIONS_MAX * WORD).next_multiple_of(PAGE);
        let bounce_at = (lanes_at + lanes * LANE_BYTES).next_multiple_of(PAGE);
        let half_bytes = bounce_at + BOUNCE_BYTES;
        Layout { lanes, grants_at, gpu_at, lanes_at, bounce_at, half_bytes }
    }

    /// Size of the whole segment. Most of its pages are never touched, and so never exist.
    pub(super) fn bytes(self) -> usize {
        2 * self.layout().half_bytes
    }
}

const CREDITS_AT: usize = CONTROL_LINES * LINE;

/// Where the parts of a half start, in bytes.
#[derive(Debug, Clone, Copy)]
struct Layout {
    lanes: usize,
    grants_at: usize,
    gpu_at: usize,
    lanes_at: usize,
    bounce_at: usize,
    half_bytes: usize,
}

/// A mapped segment, seen from one side.
#[derive(Debug)]
pub(super) struct Segment {
    mapping: Mapping,
    layout: Layout,
    /// Where the halves start that this side, and its peer, write to.
    out_at: usize,
    in_at: usize,
}

impl Segment {
    fn new(mapping: Mapping, geometry: Geometry, role: Role) -> Self {
        let layout = geometry.layout();
        let (out_at, in_at) = match role {
            Role::Initiator => (0, layout.half_bytes),
            Role::Acceptor => (layout.half_bytes, 0),
        };
        Self { mapping, layout, out_at, in_at }
    }

    /// Makes a segment as its initiator; the file is for the acceptor.
    pub(super) fn create(geometry: Geometry) -> Result<(Self, OwnedFd), Errno> {
        let file = sealed_file("immwire-session", geometry.bytes())?;
        let mapping = Mapping::new(&file, geometry.bytes(), Use::Session)?;
        Ok((Self::new(mapping, geometry, Role::Initiator), file))
    }

    /// Maps a segment that an initiator made. `INVAL` if it is not one of this geometry.
    pub(super) fn open(geometry: Geometry, file: &OwnedFd) -> Result<Self, Errno> {
        let bytes = geometry.bytes();
        if !is_sealed(file, u64::try_from(bytes).map_err(|_| Errno::INVAL)?) {
            return Err(Errno::INVAL);
        }
        let mapping = Mapping::new(file, bytes, Use::Session)?;
        Ok(Self::new(mapping, geometry, Role::Acceptor))
    }

    /// Lanes in one direction.
    pub(super) fn lanes(&self) -> usize {
        self.layout.lanes
    }

    /// The half in which this side writes to its peer.
    pub(super) fn outbound(&self) -> Half<'_> {
        Half { segment: self, at: self.out_at }
    }

    /// The half in which the peer writes to this side.
    pub(super) fn inbound(&self) -> Half<'_> {
        Half { segment: self, at: self.in_at }
    }
}

/// One direction of a segment. *Writer* and *reader* below are of immediates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Half<'a> {
    segment: &'a Segment,
    at: usize,
}

impl<'a> Half<'a> {
    fn words(self, offset: usize, count: usize) -> &'a [AtomicU64] {
        let at = self.at + offset;
        assert!(offset + count * WORD <= self.segment.layout.half_bytes);
        // SAFETY:
        // - in bounds: just checked, and the mapping has two halves of that size;
        // - aligned: every offset of the layout is a multiple of a word, and mappings of a page;
        // - alive: the slice borrows the segment, which owns the mapping;
        // - shared: any 64 bits are an `AtomicU64`, and whoever else maps the file accesses these
        //   words as atomics too; a peer that does not tears nothing that we rely on.
        unsafe {
            let first = self.segment.mapping.base.as_ptr().add(at).cast::<AtomicU64>();
            std::slice::from_raw_parts(first, count)
        }
    }

    fn word(self, offset: usize) -> &'a AtomicU64 {
        // PROOF: `words(_, 1)` has one element.
        &self.words(offset, 1)[0]
    }

    /// Writer's: the key it is writing under. See `immwire_core::hazard`.
    pub(super) fn active(self) -> &'a AtomicU64 {
        self.word(0)
    }

    /// Writer's: a bit for each lane that has ever been used.
    pub(super) fn lanes_used(self) -> &'a AtomicU64 {
        self.word(LINE)
    }

    /// Writer's: bytes ever put into the bounce ring.
    pub(super) fn bounce_head(self) -> &'a AtomicU64 {
        self.word(LINE + WORD)
    }

    /// Writer's: whether what lies in the bounce ring may be delivered; a grant to the reader.
    pub(super) fn bounce_grant(self) -> &'a AtomicU64 {
        self.word(LINE + 2 * WORD)
    }

    /// Reader's: whether it is delivering a record now; the hazard word to that grant.
    pub(super) fn bounce_active(self) -> &'a AtomicU64 {
        self.word(2 * LINE + WORD)
    }

    /// Reader's: bytes ever taken out of the bounce ring.
    pub(super) fn bounce_tail(self) -> &'a AtomicU64 {
        self.word(2 * LINE)
    }

    /// Reader's: whether it sleeps, and is to be woken by a message on the socket.
    pub(super) fn doorbell(self) -> &'a Doorbell {
        let word = self.word(3 * LINE).as_ptr();
        // SAFETY: `Doorbell` is a transparent `AtomicU32`, any bits are one, and it may lie in shared
        // memory (its documentation); the word is valid and aligned for as long as the segment lives.
        unsafe { &*word.cast::<Doorbell>() }
    }

    /// Reader's: how many grants it has withdrawn.
    pub(super) fn withdrawals(self) -> &'a AtomicU64 {
        self.word(4 * LINE)
    }

    /// Reader's: how far it has read `lane`. `lane` is below [`Segment::lanes`].
    pub(super) fn credit(self, lane: usize) -> &'a AtomicU64 {
        self.word(CREDITS_AT + lane * LINE)
    }

    /// Reader's: the key under which its region `id` may be written. `None`: no region has that id.
    pub(super) fn grant(self, id: u32) -> Option<&'a AtomicU64> {
        let id = usize::try_from(id).ok().filter(|id| *id < REGIONS_MAX)?;
        Some(self.word(self.segment.layout.grants_at + id * WORD))
    }

    /// Writer's: the key under which a GPU of its is writing to region `id`: the hazard word to that grant.
    pub(super) fn gpu_active(self, id: u32) -> Option<&'a AtomicU64> {
        let id = usize::try_from(id).ok().filter(|id| *id < REGIONS_MAX)?;
        Some(self.word(self.segment.layout.gpu_at + id * WORD))
    }

    /// Writer's: to how many regions its GPUs are writing.
    pub(super) fn gpu_claims(self) -> &'a AtomicU64 {
        self.word(5 * LINE)
    }

    /// Writer's: the ring of `lane`. `lane` is below [`Segment::lanes`].
    pub(super) fn lane(self, lane: usize) -> &'a [Entry] {
        let offset = self.segment.layout.lanes_at + lane * LANE_BYTES;
        self.words(offset, LANE_BYTES / WORD).as_chunks().0
    }

    /// Writer's, status words the reader's: the bounce ring.
    pub(super) fn bounce(self) -> &'a [AtomicU64] {
        self.words(self.segment.layout.bounce_at, BOUNCE_BYTES / WORD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_parts_of_any_geometry_overlap_and_all_lie_inside() {
        for initiator_nics in 1..=8 {
            for acceptor_nics in 1..=8 {
                let g = Geometry { initiator_nics, acceptor_nics };
                let (s, _file) = Segment::create(g).unwrap();
                let mut parts = Vec::new();
                for half in [s.outbound(), s.inbound()] {
                    let lines =
                        [half.active(), half.lanes_used(), half.bounce_tail(), half.gpu_claims()];
                    let doorbell = ptr::from_ref(half.doorbell()) as usize;
                    parts.extend([(doorbell, LINE), (half.withdrawals().as_ptr() as usize, LINE)]);
                    let span = |w: &[AtomicU64]| (w.as_ptr() as usize, w.len() * WORD);
                    for line in lines {
                        parts.push((line.as_ptr() as usize, LINE));
                    }
                    for lane in 0..s.lanes() {
                        parts.push((half.credit(lane).as_ptr() as usize, LINE));
                        parts.push(span(half.lane(lane).as_flattened()));
                    }
                    parts.push(span(half.words(g.layout().grants_at, REGIONS_MAX)));
                    parts.push(span(half.words(g.layout().gpu_at, REGIONS_MAX)));
                    parts.push(span(half.bounce()));
                }
                parts.sort_unstable();
                assert!(parts.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{g:?}");
                let base = s.mapping.base.as_ptr() as usize;
                let last = parts[parts.len() - 1];
                assert!(parts[0].0 >= base && last.0 + last.1 <= base + g.bytes());
            }
        }
    }

    #[test]
    fn large_mappings_are_aligned_and_leave_no_address_reserved() {
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap();
        for bytes in [HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1, 5 * HUGE_BYTES + PAGE] {
            let file = sealed_file("alignment", bytes).unwrap();
            let mappings = [(); 3].map(|()| Mapping::new(&file, bytes, Use::Peers).unwrap());
            for mapping in &mappings {
                let at = mapping.base.as_ptr() as usize;
                assert!(bytes < HUGE_BYTES || at.is_multiple_of(HUGE_BYTES));
                // SAFETY: first and last byte of a mapping that lives.
                unsafe {
                    mapping.base.as_ptr().write_volatile(1);
                    mapping.base.as_ptr().add(bytes - 1).write_volatile(2);
                }
            }
            let end = mappings[0].base.as_ptr() as usize + bytes.next_multiple_of(PAGE);
            assert!(
                lines().contains(&format!("{:x}-{end:x} rw-s", mappings[0].base.as_ptr() as usize))
            );
            drop(mappings);
            assert!(!lines().contains("memfd:alignment"));
        }
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert!(Mapping::new(&pipe, HUGE_BYTES, Use::Peers).is_err());
    }

    /// Of a session few pages are ever touched.
    #[test]
    fn regions_are_offered_for_huge_pages_and_sessions_are_not() {
        let geometry = Geometry { initiator_nics: 1, acceptor_nics: 1 };
        let region = sealed_file("a-region", HUGE_BYTES).unwrap();
        let _region = Mapping::new(&region, HUGE_BYTES, Use::Peers).unwrap();
        let (_ours, file) = Segment::create(geometry).unwrap();
        let _theirs = Segment::open(geometry, &file).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let offered = |name: &str| {
            let mut at_it = false;
            let mut found = Vec::new();
            for line in maps.lines() {
                if let Some(flags) = line.strip_prefix("VmFlags:") {
                    if std::mem::take(&mut at_it) {
                        found.push(flags.split_whitespace().any(|flag| flag == "hg"));
                    }
                } else {
                    at_it |= line.contains(name);
                }
            }
            found
        };
        let sessions = offered("memfd:immwire-session");
        assert!(sessions.len() >= 2 && !sessions.contains(&true), "{sessions:?}");
        let knows = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(offered("memfd:a-region"), [knows]);
    }

    /// Whether a forked child has the mapping, and finds there what the parent wrote.
    fn is_in_a_child(mapping: &Mapping) -> bool {
        let at = mapping.base.as_ptr();
        // SAFETY: first byte of a mapping that lives. The child touches nothing but that byte, which may end it, and ends: it
        // runs nothing of other threads', and no destructor.
        let child = unsafe {
            at.write_volatile(7);
            match libc::fork() {
                0 => libc::_exit(i32::from(at.read_volatile())),
                child => child,
            }
        };
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: a child of ours, that nobody else waits for; `status` is a place for the answer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7
    }

    #[test]
    fn a_forked_child_has_its_user_s_memory_and_no_other() {
        for bytes in [PAGE, HUGE_BYTES] {
            let file = sealed_file("fork", bytes).unwrap();
            assert!(is_in_a_child(&Mapping::new(&file, bytes, Use::Own).unwrap()));
            for others in [Use::Peers, Use::Session] {
                assert!(!is_in_a_child(&Mapping::new(&file, bytes, others).unwrap()));
            }
        }
    }

    #[test]
    fn both_ends_see_each_other_s_words() {
        use std::sync::atomic::Ordering::Relaxed;
        let geometry = Geometry { initiator_nics: 2, acceptor_nics: 3 };
        let (mine, file) = Segment::create(geometry).unwrap();
        let theirs = Segment::open(geometry, &file).unwrap();
        mine.outbound().active().store(1, Relaxed);
        theirs.outbound().credit(5).store(2, Relaxed);
        mine.inbound().grant(16_383).unwrap().store(3, Relaxed);
        assert_eq!(theirs.inbound().active().load(Relaxed), 1);
        assert_eq!(mine.inbound().credit(5).load(Relaxed), 2);
        assert_eq!(theirs.outbound().grant(16_383).unwrap().load(Relaxed), 3);
        assert!(mine.inbound().grant(16_384).is_none());
    }

    #[test]
    fn a_file_that_is_short_or_unsealed_or_not_memory_is_refused() {
        let geometry = Geometry { initiator_nics: 1, acceptor_nics: 1 };
        let short = sealed_file("short", geometry.bytes() - 1).unwrap();
        assert_eq!(Segment::open(geometry, &short).err(), Some(Errno::INVAL));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("unsealed", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, geometry.bytes() as u64).unwrap();
        assert_eq!(Segment::open(geometry, &unsealed).err(), Some(Errno::INVAL));
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert_eq!(Segment::open(geometry, &pipe).err(), Some(Errno::INVAL));
        let good = sealed_file("good", geometry.bytes()).unwrap();
        assert!(rustix::fs::ftruncate(&good, 0).is_err());
        assert!(Segment::open(geometry, &good).is_ok());
    }

    #[test]
    fn room_is_made_in_whole_pages_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for len in [1, page - 1, page, page + 1, HUGE_BYTES, HUGE_BYTES + 4096] {
                let Room { kept, space } = room(len, page).unwrap();
                assert!(kept >= len && kept - len < page, "{len} in pages of {page}");
                assert_eq!(kept % page, 0, "{len} in pages of {page}");
                assert_eq!(space, kept + HUGE_BYTES);
            }
            assert_eq!(room(usize::MAX, page), None);
            assert_eq!(room(usize::MAX - HUGE_BYTES, page), None);
        }
    }
}
