//! The GPUs of an engine: memory of theirs that peers write to, and the copies that they make.
//!
//! A piece whose bytes lie in a GPU's memory, or go there, is copied by a GPU: the one that has the source; from host
//! memory the one that has the destination. Peers' memory is opened once for each region, and their host memory pinned. What
//! one call of `post` takes to a peer is merged: ranges that pieces make up, or pieces of one length (the core's `batch`). Runs of pages of several calls are,
//! too, while the GPU has enough to do, also if they count their pages from different places (the core's `scale`). A copy's last
//! act is to store its number to a word of pinned host memory; whoever reads it there sees that all of its bytes are where
//! they belong (`immwire_cuda::Release`), and the immediates are sent.
//!
//! # What it refuses to know
//!
//! Counts, plans and credits, which pieces are copied together, which of a GPU's queues a copy goes to, and when it begins (the core's); which kernel and how many pieces a launch has
//! (`immwire_cuda::geometry`).
//!
//! # Limits
//!
//! While a peer's region of `cudaMalloc` is closed on a GPU that is busy, the driver keeps its other calls of this process waiting, too: so
//! no copies are enqueued until the GPU has done what it was given before; the rest goes on. Whether anything is being closed is asked
//! before each of them: others begin to close at any time, and what a call of `post` has staged takes the driver a while. Nor is memory of
//! a peer's opened meanwhile, or ours handed out: what was said of it waits (`super::session`). Memory mapped by hand, as `alloc_gpu` and
//! PyTorch's expandable segments have it, is closed at once.
//!
//! A peer's host memory is pinned in parts of 256 MiB, each when a GPU is first to write there, by the engine's own thread: some 43 ms for each
//! GiB, in which the driver keeps all other calls of the process waiting (seen on 580.159.04), whichever thread pins. No more is pinned than
//! what is written to, whatever the peer says of its length.
//!
//! # Invariants
//!
//! - A copy is enqueued under a [`Claim`] on its destination, which ends when the copy has. The owner of the region waits
//!   for it (`Link::is_quiet`), also after our process has died: until the kernel has let go of all that was ours.
//! - What was opened by a legacy handle is claimed as long as it is open: its owner may not free it before (CUDA driver
//!   API, `cuIpcOpenMemHandle`). Like all that was opened it is closed by a thread of its own ([`crate::closer`]): the
//!   driver takes as long for that as the application's kernels do.
//! - What a copy uses is kept by its [`Flight`]: destination, tables, and by the engine's own rule the source.
//! - Every piece that was staged is reported once: as copied, or as failed.
//! - After set-up nothing here allocates but the driver.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use immwire_core::batch::{Batch, Form, Range};
use immwire_core::group::{WorkError, WorkRequest};
use immwire_core::hazard;
use immwire_core::id::{PeerId, Time};
use immwire_core::plan::RunLayout;
use immwire_core::region::MrDesc;
use immwire_core::scale;
use immwire_core::spread::{self, Growth, Load};
use immwire_core::standby::{self, Ended};
use immwire_cuda::geometry::{self, Method, Tuning};
use immwire_cuda::{
    Allocations, Copier, Device, Error, Found, Handover, Joining, NotOpened, NotPinned, Opened,
    PagedCopy, Pages, Pinned, PinnedMemory, Received, Release, Stream, Uuid,
};
use rustix::io::Errno;

use super::handshake::{By, Sizes};
use super::memory::{Link, id_of};
use super::segment::Mapping;
use super::socket::FILES_MAX;
use super::standing::{Short, Standing};
use crate::closer::Closer;
use crate::gpus::{CLOSED_WITHIN, GPUS_MAX, Known, One, number, page_bytes};
use crate::largest::largest;
use crate::provider::{Sink, Window};
use crate::sync::lock;

/// Queues of each GPU. Which of them a copy goes to: `core::spread`.
const QUEUES: usize = 8;
/// Copies under way in one queue. Few: each has a table of 128 KiB in pinned memory, all queues of a GPU together 8 MiB.
const COPIES: usize = 8;
/// Pages that one launch copies at most: to begin one and to end it takes some 7 us, in which less is copied.
const LAUNCH_PAGES: usize = 16_384;
/// Bytes of a peer's host memory that are pinned in one go.
const PART_BYTES: u64 = 256 << 20;
/// Bytes that it copies at most, unless one piece has more: whoever cancels waits for it.
const LAUNCH_BYTES: u64 = 256 << 20;

/// Words of a copy's table.
const TABLE: usize = 2 * LAUNCH_PAGES;

// What is copied by other kernels is what lies on other grids.
const _: () = {
    let [aligned, line] = scale::GRIDS;
    assert!(aligned == geometry::ALIGNED_BYTES && line == geometry::LINE_BYTES);
};

/// Pieces that one copy carries at most.
const PIECES: usize = 256;
/// Regions that it goes to at most.
const REGIONS: usize = 32;
/// How long copies may be under way without one ending before the GPU is asked whether it has failed.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// How long GPUs may take, at the end, for what they were given.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// Which memory a key is of, in bits 24 to 31 of it. An engine's own numbers: a peer's only say whether it is a GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Of the host.
    Host,
    /// Of the host, and not pinned: GPUs do not read it. In the keys of sources only.
    Unreached,
    /// Of the engine's GPU of this index.
    Gpu(u8),
}

/// All GPUs that an engine may have have numbers below that of what they do not reach.
const _: () = assert!(GPUS_MAX < UNREACHED as usize);
const UNREACHED: u8 = u8::MAX;

impl Kind {
    const SHIFT: u32 = 24;

    /// Its bits in a key.
    pub(super) fn bits(self) -> u64 {
        let number = match self {
            Self::Host => 0,
            Self::Unreached => u64::from(UNREACHED),
            Self::Gpu(index) => 1 + u64::from(index),
        };
        number << Self::SHIFT
    }

    #[inline]
    pub(super) fn of(key: u64) -> Self {
        match (key >> Self::SHIFT & 0xff) as u8 {
            0 => Self::Host,
            UNREACHED => Self::Unreached,
            number => Self::Gpu(number - 1),
        }
    }

    #[inline]
    pub(super) fn is_host(self) -> bool {
        !matches!(self, Self::Gpu(_))
    }
}

/// Mapped memory that GPUs reach, as far as it is pinned by us: unmapped when it has been unpinned, and not at all if it is to stay so.
#[derive(Debug)]
pub(super) struct Reachable<M> {
    pinned: Vec<Pinned>,
    mapping: Option<M>,
}

impl<M> Reachable<M> {
    pub(super) fn new(pinned: Option<Pinned>, mapping: M) -> Self {
        Self { pinned: pinned.into_iter().collect(), mapping: Some(mapping) }
    }
}

impl<M> Drop for Reachable<M> {
    fn drop(&mut self) {
        let mut all = true;
        for pinned in self.pinned.drain(..) {
            all &= pinned.unpin();
        }
        if !all {
            std::mem::forget(self.mapping.take());
        }
    }
}

/// A peer's host memory, mapped here. Parts of it are pinned as they are first written to: how much there is of it, the peer says.
#[derive(Debug)]
struct Host {
    base: u64,
    bytes: u64,
    /// Whether each part is pinned, and how many are not. The engine's thread alone writes them.
    parts: Box<[AtomicBool]>,
    missing: AtomicUsize,
    memory: Mutex<Reachable<Arc<Mapping>>>,
}

impl Host {
    /// Of a mapping of at least `bytes` bytes.
    fn new(mapping: &Arc<Mapping>, bytes: u64) -> Self {
        // Whatever is mapped has far fewer parts than there are addresses.
        let count = usize::try_from(bytes.div_ceil(PART_BYTES)).unwrap_or(0);
        Self {
            base: mapping.base().as_ptr() as u64,
            bytes,
            parts: (0..count).map(|_| AtomicBool::new(false)).collect(),
            missing: AtomicUsize::new(count),
            memory: Mutex::new(Reachable::new(None, Arc::clone(mapping))),
        }
    }

    fn is_pinned(&self) -> bool {
        self.missing.load(Ordering::Relaxed) == 0
    }

    /// Pins the parts that `len` bytes from `address` on lie in, which are inside, as far as they are not pinned. Calls the driver then.
    /// [`Staging::NoRoom`]: the driver would keep us waiting.
    fn pin(&self, known: &Known, device: &Device, address: u64, len: u64) -> Result<(), Staging> {
        let (first, last) = parts_of(address.saturating_sub(self.base), len);
        for (part, number) in self.parts.iter().zip(0_u64..).take(last + 1).skip(first) {
            if !part.load(Ordering::Relaxed) {
                if known.closer.is_busy() {
                    return Err(Staging::NoRoom);
                }
                self.pin_part(known, device, number).map_err(|why| {
                    tracing::warn!(%why, "a peer's host memory cannot be pinned");
                    Staging::Failed(WorkError::LocalAccess)
                })?;
                part.store(true, Ordering::Relaxed);
                self.missing.fetch_sub(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn pin_part(&self, known: &Known, device: &Device, number: u64) -> Result<(), Error> {
        known.must_use_host_pointers()?;
        let at = number * PART_BYTES;
        let bytes = usize::try_from(self.bytes.saturating_sub(at).min(PART_BYTES)).unwrap_or(0);
        // SAFETY: the mapping has at least `self.bytes` bytes, and is kept until after it has been unpinned (`Reachable`).
        let pinned = unsafe { Pinned::new(device, self.base + at, bytes, page_bytes(), false) };
        let mut memory = lock(&self.memory);
        match pinned {
            Ok(pinned) => memory.pinned.extend(pinned),
            Err(NotPinned { why, left }) => {
                // Unpinned by the closer, as the driver may wait; mapped until then.
                let mapping = memory.mapping.clone();
                known.closer.give(Reachable { pinned: left.into_iter().collect(), mapping });
                return Err(why);
            }
        }
        Ok(())
    }
}

/// The first and the last part that `len` bytes from `offset` on lie in.
fn parts_of(offset: u64, len: u64) -> (usize, usize) {
    let part = |at: u64| usize::try_from(at / PART_BYTES).unwrap_or(usize::MAX - 1);
    (part(offset), part(offset.saturating_add(len.saturating_sub(1))))
}

/// A region of GPU memory, as its owner describes it to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) uuid: Uuid,
    /// The region's first byte and length, and the same of the allocation that it lies in, or of all of several, as the owner has
    /// them.
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) start: u64,
    pub(super) whole: u64,
}

impl Described {
    /// Whether the region lies in its allocations.
    fn is_sound(&self) -> bool {
        let offset = self.base.checked_sub(self.start);
        let end = offset.and_then(|offset| offset.checked_add(self.len));
        self.len > 0 && end.is_some_and(|end| end <= self.whole)
    }
}

/// How one GPU of ours gets at a peer's region: the address that stands for its first byte.
#[derive(Debug)]
struct Way {
    address: u64,
    /// Keeps it so. `None`: the region is of this process, and its owner's rules keep it.
    opened: Option<Arc<Opened>>,
    /// The GPU that has such a region, whoever of this process uses it.
    _home: Option<Device>,
}

impl Way {
    /// An error: there are not so many addresses.
    fn to(described: &Described, opened: Opened) -> Result<Self, NotOpened> {
        let offset = described.base.checked_sub(described.start);
        match offset.and_then(|offset| opened.address().checked_add(offset)) {
            Some(address) => Ok(Self { address, opened: Some(Arc::new(opened)), _home: None }),
            None => {
                let why = Error::OutOfBounds { end: described.base, bytes: described.whole };
                Err(NotOpened { why, left: Some(opened) })
            }
        }
    }
}

fn not_opened(device: &Device, why: Error) {
    tracing::warn!(%why, gpu = device.ordinal(), "a peer's GPU memory cannot be opened");
}

/// Why none of our GPUs gets at a peer's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotReached {
    /// It is not what its owner says, or was withdrawn.
    Refused,
    /// No fault of its owner's: our driver does not open it, as GPUs are not connected, or something is lacking.
    Failed,
}

impl NotReached {
    /// From why each GPU does not, as far as that is known: who says that there is more than there is, is to blame, whatever else is lacking.
    fn of(all: impl IntoIterator<Item = Error>) -> Self {
        let is_theirs = |why| matches!(why, Error::OutOfBounds { .. });
        if all.into_iter().any(is_theirs) { Self::Refused } else { Self::Failed }
    }
}

/// A peer's region over several allocations, some of which have come. Each of our GPUs has addresses for all of them, where it maps
/// them as they come.
#[derive(Debug)]
pub(super) struct Arriving {
    described: Described,
    /// How many there are, and how many have come.
    count: u32,
    next: u32,
    /// By index of our GPU; or why it does not get at one of them.
    ways: Vec<Result<Joining, Error>>,
    /// Unmaps what nobody joins.
    closer: Arc<Closer>,
}

impl Drop for Arriving {
    /// Not here: the driver may keep callers waiting.
    fn drop(&mut self) {
        if self.ways.iter().any(Result::is_ok) {
            self.closer.give(std::mem::take(&mut self.ways));
        }
    }
}

impl Arriving {
    /// An error: what is said of the region contradicts itself, or no GPU has so many addresses.
    pub(super) fn new(known: &Known, described: Described, count: u32) -> Result<Self, NotReached> {
        if !described.is_sound() {
            return Err(NotReached::Refused);
        }
        let way = |One { device, .. }: &One| {
            let joining = Joining::new(device, described.whole);
            joining.inspect_err(|why| not_opened(device, *why))
        };
        let ways = known.devices.iter().map(way).collect();
        let closer = Arc::clone(&known.closer);
        let arriving = Self { described, count, next: 0, ways, closer };
        arriving.is_reached().map(|()| arriving)
    }

    /// Whether any GPU of ours gets at all that has come.
    fn is_reached(&self) -> Result<(), NotReached> {
        if self.ways.iter().any(Result::is_ok) {
            return Ok(());
        }
        Err(NotReached::of(self.ways.iter().filter_map(|way| way.as_ref().err().copied())))
    }

    /// The number of the next that is to come; `None`: all have.
    pub(super) fn next(&self) -> Option<u32> {
        (self.next < self.count).then_some(self.next)
    }

    /// What its owner calls the region's first byte.
    pub(super) fn base(&self) -> u64 {
        self.described.base
    }

    /// Whether so many are still to come.
    pub(super) fn has_room(&self, files: &[OwnedFd]) -> bool {
        let left = self.count.saturating_sub(self.next);
        u32::try_from(files.len()).is_ok_and(|count| count <= left)
    }

    /// Maps what has come: these files, of allocations of so many bytes, as many. An error: no GPU of ours gets at all of them.
    pub(super) fn take(&mut self, files: &[OwnedFd], sizes: &[u64]) -> Result<(), NotReached> {
        for (file, bytes) in files.iter().zip(sizes) {
            for (way, at) in self.ways.iter_mut().zip(0_usize..) {
                let Ok(joining) = way else { continue };
                if let Err(why) = joining.add(file.as_fd(), *bytes) {
                    tracing::warn!(%why, at, part = self.next, "a peer's GPU memory cannot be opened");
                    *way = Err(why);
                }
            }
            self.next = self.next.saturating_add(1);
        }
        self.is_reached()
    }
}

/// A peer's region that our GPUs write to.
#[derive(Debug)]
pub(super) struct Reached {
    link: Arc<Link>,
    key: u64,
    /// What pieces call the first byte, and how many there are.
    base: u64,
    len: u64,
    /// The one of our GPUs that has the memory.
    home: Option<usize>,
    /// It stays what it is until the last of those who opened it has closed it, whatever its owner does.
    outlives_owner: bool,
    /// By index of our GPU.
    ways: Vec<Option<Way>>,
    /// Opened, and of no use: closed with the rest, by who can wait for the driver.
    unfit: Vec<Opened>,
    /// Claims on it.
    claims: AtomicU32,
    /// One of them is its own.
    is_held: bool,
    /// For host memory.
    host: Option<Host>,
    /// Whose closer has it closed.
    known: Arc<Known>,
}

/// What is left of a [`Reached`] that nobody uses any more.
struct Remains {
    ways: Vec<Option<Way>>,
    unfit: Vec<Opened>,
    host: Option<Host>,
    /// What it claims of itself, until it is closed.
    held: Option<(Arc<Link>, u64)>,
}

impl Drop for Remains {
    fn drop(&mut self) {
        // Closed first: its owner may free it as soon as it is not claimed.
        let mut is_closed = true;
        for opened in self.ways.drain(..).flatten().filter_map(|way| way.opened) {
            // What is shared with a window was opened by no handle: it outlives its owner.
            is_closed &= Arc::into_inner(opened).is_none_or(Opened::close);
        }
        for opened in self.unfit.drain(..) {
            is_closed &= opened.close();
        }
        drop(self.host.take());
        let Some((link, key)) = self.held.take() else { return };
        if is_closed {
            end_claim(&link, key);
        } else {
            // For as long as this process lives.
            std::mem::forget(link);
        }
    }
}

/// The last claim on a region ends. What is closed later is claimed anew under a later key only, as its owner takes it back only when this has
/// been done, and what was opened is not asked for again under the same key.
fn end_claim(link: &Link, key: u64) {
    let out = link.segment.outbound();
    if let Some(active) = out.gpu_active(id_of(key)) {
        hazard::leave(active);
    }
    out.gpu_claims().fetch_sub(1, Ordering::Release);
}

impl Reached {
    /// A peer's GPU memory, whose first byte pieces call `first`.
    pub(super) fn device(
        known: &Arc<Known>,
        link: &Arc<Link>,
        key: u64,
        first: u64,
        described: &Described,
        received: Received<'_>,
        same_process: bool,
    ) -> Result<Self, NotReached> {
        if !described.is_sound() {
            return Err(NotReached::Refused);
        }
        let mut reached = Self::unopened(known, link, key, first, described);
        reached.outlives_owner = matches!(received, Received::File(_));
        // A handle opens nothing in the process that it is from, where the address itself will do.
        let is_near = same_process && matches!(received, Received::Handle(_));
        let home = if is_near { reached.find_home(described.uuid) } else { None };
        let (mut not, mut unfit) = (Vec::new(), Vec::new());
        let way = |One { device, .. }: &One| {
            let made = if is_near {
                let home = home.as_ref()?;
                let way =
                    || Way { address: described.base, opened: None, _home: Some(home.clone()) };
                device.reach(home).map(|()| way()).map_err(NotOpened::from)
            } else {
                let opened = Opened::new(device, received, described.whole);
                opened.and_then(|opened| Way::to(described, opened))
            };
            match made {
                Ok(way) => Some(way),
                Err(NotOpened { why, left }) => {
                    not_opened(device, why);
                    not.push(why);
                    unfit.extend(left);
                    None
                }
            }
        };
        let by_handle = matches!(received, Received::Handle(_)) && !is_near;
        if by_handle {
            reached.is_held = reached.enter();
            if !reached.is_held {
                return Err(NotReached::Refused);
            }
        }
        reached.ways = known.devices.iter().map(way).collect();
        reached.unfit = unfit;
        if reached.is_any_way() {
            return Ok(reached);
        }
        // Nothing is open: it may be asked for again, and claimed anew, before the closer comes to it. What is unfit is refused for good.
        if reached.unfit.is_empty() && std::mem::take(&mut reached.is_held) {
            reached.leave();
        }
        Err(NotReached::of(not))
    }

    /// The same of several allocations, all of which have come.
    pub(super) fn joined(
        known: &Arc<Known>,
        link: &Arc<Link>,
        key: u64,
        first: u64,
        mut arriving: Arriving,
    ) -> Result<Self, NotReached> {
        let (described, ways) = (arriving.described, std::mem::take(&mut arriving.ways));
        let mut reached = Self::unopened(known, link, key, first, &described);
        reached.outlives_owner = true;
        let mut not = Vec::new();
        let way = |(joining, one): (Result<Joining, Error>, &One)| {
            let joining = joining.map_err(|why| not.push(why)).ok()?;
            let opened = joining.finish().map_err(NotOpened::from);
            // What is left was mapped by hand: nobody waits to unmap that.
            let failed = |NotOpened { why, .. }| {
                not_opened(&one.device, why);
                not.push(why);
            };
            opened.and_then(|opened| Way::to(&described, opened)).map_err(failed).ok()
        };
        reached.ways = ways.into_iter().zip(&known.devices).map(way).collect();
        if reached.is_any_way() { Ok(reached) } else { Err(NotReached::of(not)) }
    }

    /// The GPU of that name, which another engine of this process uses, if not this one.
    fn find_home(&self, uuid: Uuid) -> Option<Device> {
        if let Some(one) = self.home.and_then(|home| self.known.devices.get(home)) {
            return Some(one.device.clone());
        }
        match Device::named(uuid) {
            Ok(Some(device)) => return Some(device),
            Ok(None) => {
                tracing::warn!("a peer of this process has memory of a GPU that is not here");
            }
            Err(why) => tracing::warn!(%why, "the GPU that has a peer's memory cannot be opened"),
        }
        None
    }

    fn is_any_way(&self) -> bool {
        self.ways.iter().any(Option::is_some)
    }

    /// Whether this GPU gets at the region, wherever in it.
    fn has_way(&self, gpu: usize) -> bool {
        self.ways.get(gpu).is_some_and(Option::is_some)
    }

    /// GPU memory that there is no way to yet.
    fn unopened(
        known: &Arc<Known>,
        link: &Arc<Link>,
        key: u64,
        first: u64,
        described: &Described,
    ) -> Self {
        Self {
            link: Arc::clone(link),
            key,
            base: first,
            len: described.len,
            home: known.by_uuid(described.uuid),
            outlives_owner: false,
            ways: Vec::new(),
            unfit: Vec::new(),
            claims: AtomicU32::new(0),
            is_held: false,
            host: None,
            known: Arc::clone(known),
        }
    }

    /// A peer's host memory, which is mapped here in `bytes` bytes, and is `base` to pieces. Asks no driver.
    pub(super) fn host(
        known: &Arc<Known>,
        link: &Arc<Link>,
        key: u64,
        base: u64,
        mapping: &Arc<Mapping>,
        bytes: u64,
    ) -> Self {
        let host = Host::new(mapping, bytes);
        let way = |_: &One| Some(Way { address: host.base, opened: None, _home: None });
        Self {
            link: Arc::clone(link),
            key,
            base,
            len: bytes,
            home: None,
            outlives_owner: false,
            ways: known.devices.iter().map(way).collect(),
            unfit: Vec::new(),
            claims: AtomicU32::new(0),
            is_held: false,
            host: Some(host),
            known: Arc::clone(known),
        }
    }

    /// Has GPUs reach `len` bytes at each of these addresses of theirs, which are inside; else what becomes of the piece. Calls the driver if it
    /// is host memory, and was not written to there before.
    fn pin(&self, len: u64, mut addresses: impl Iterator<Item = u64>) -> Result<(), Staging> {
        let Some(host) = self.host.as_ref().filter(|host| !host.is_pinned()) else {
            return Ok(());
        };
        let device = self.known.first().ok_or(Staging::Failed(WorkError::LocalAccess))?;
        addresses.try_for_each(|address| host.pin(&self.known, device, address, len))
    }

    /// Where `len` bytes from what pieces call address `dst` are for GPU `gpu`, if they are all inside.
    fn address(&self, gpu: usize, dst: u64, len: u64) -> Option<u64> {
        let way = self.ways.get(gpu)?.as_ref()?;
        let offset = dst.checked_sub(self.base)?;
        let end = offset.checked_add(len)?;
        if end <= self.len { way.address.checked_add(offset) } else { None }
    }

    /// Where kernels of one of our GPUs reach the region, for as long as they like: only what outlives its owner.
    pub(super) fn window(&self, gpu: usize, region: &MrDesc) -> Option<Window> {
        let way = self.ways.get(gpu)?.as_ref().filter(|_| self.outlives_owner)?;
        let address = self.address(gpu, region.base, region.len)?;
        Some(Window::new(address, Arc::clone(way.opened.as_ref()?)))
    }

    /// Claims the region; `false`: it was withdrawn. Ends with [`Reached::leave`].
    fn enter(&self) -> bool {
        let out = self.link.segment.outbound();
        let id = id_of(self.key);
        let (Some(grant), Some(active)) = (out.grant(id), out.gpu_active(id)) else {
            return false;
        };
        // Relaxed: claims of a session are made and ended by the engine's thread, but for the last one of what is closed.
        let may = match self.claims.load(Ordering::Relaxed) {
            0 => {
                let total = out.gpu_claims();
                total.fetch_add(1, Ordering::Release);
                let may = hazard::enter(active, grant, self.key);
                if !may {
                    total.fetch_sub(1, Ordering::Release);
                }
                may
            }
            _ => hazard::may_continue(grant, self.key),
        };
        if may {
            self.claims.fetch_add(1, Ordering::Relaxed);
        }
        may
    }

    fn leave(&self) {
        if self.claims.fetch_sub(1, Ordering::Relaxed) == 1 {
            end_claim(&self.link, self.key);
        }
    }

    fn may_continue(&self) -> bool {
        let grant = self.link.segment.outbound().grant(id_of(self.key));
        grant.is_some_and(|grant| hazard::may_continue(grant, self.key))
    }
}

/// The right to have a GPU write to a peer's region, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim(Arc<Reached>);

impl Claim {
    /// `None`: the region was withdrawn.
    fn new(reached: &Arc<Reached>) -> Option<Self> {
        if !reached.enter() {
            return None;
        }
        Some(Self(Arc::clone(reached)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Reached {
    /// Nobody has a claim on it but itself.
    fn drop(&mut self) {
        let remains = Remains {
            ways: std::mem::take(&mut self.ways),
            unfit: std::mem::take(&mut self.unfit),
            host: self.host.take(),
            held: self.is_held.then(|| (Arc::clone(&self.link), self.key)),
        };
        self.known.closer.give(remains);
    }
}

/// Claims on all that one copy goes to.
type Claims = heapless::Vec<Claim, REGIONS>;

/// A copy under way.
#[derive(Debug)]
struct Flight {
    number: u64,
    pieces: usize,
    bytes: u64,
    _claims: Claims,
}

/// Copies of one GPU that are made in order.
#[derive(Debug)]
struct Queue {
    copier: Copier,
    /// The number of the last copy that has ended: the GPU's to write.
    ended: PinnedMemory,
    issued: u64,
    /// The driver's answer when it would not take all of the last copy, whose number is never stored then: it ends, as
    /// failed, when nothing is in the queue any more. Until then nothing is added.
    refused: Option<i32>,
    /// By the number of the copy that reads them, modulo how many there are: page numbers of the source, then of the target.
    tables: PinnedMemory,
    /// What is to become its next copy.
    staged: Staged,
    flights: VecDeque<Flight>,
    /// Theirs, in order.
    pieces: VecDeque<WorkRequest>,
    /// Bytes that they copy.
    bytes: u64,
}

impl Queue {
    fn new(copier: Copier) -> Result<Self, Error> {
        let device = copier.stream().device();
        Ok(Self {
            ended: PinnedMemory::zeroed(device, size_of::<u64>())?,
            issued: 0,
            refused: None,
            tables: PinnedMemory::zeroed(device, COPIES * TABLE * size_of::<u32>())?,
            staged: Staged::new(),
            copier,
            flights: VecDeque::with_capacity(COPIES),
            pieces: VecDeque::with_capacity(COPIES * PIECES),
            bytes: 0,
        })
    }

    /// What it has to do; what is staged becomes a copy before another is.
    fn load(&self) -> Load<PeerId> {
        let last = self.staged.pieces.last().or(self.pieces.back());
        let copies = self.flights.len() + usize::from(self.staged.is_any());
        Load {
            to: last.map(|work| work.peer),
            bytes: self.bytes.saturating_add(self.staged.bytes),
            has_room: copies < COPIES && self.refused.is_none(),
        }
    }

    /// The table of the next copy, and what is staged of it. Nobody reads the table: with room for another copy, the one that did
    /// has ended.
    fn next_table(&mut self) -> Option<(&mut [u32], &mut [u32], &mut Staged)> {
        let at = usize::try_from((self.issued + 1) % COPIES as u64).ok()? * TABLE;
        let table = self.tables.words_mut(at..at + TABLE)?;
        let (sources, targets) = table.split_at_mut_checked(LAUNCH_PAGES)?;
        Some((sources, targets, &mut self.staged))
    }

    /// Where the GPU finds the two halves of the table of copy `number`.
    fn table_addresses(&self, number: u64) -> (u64, u64) {
        let source =
            self.tables.address() + number % COPIES as u64 * (TABLE * size_of::<u32>()) as u64;
        (source, source + (LAUNCH_PAGES * size_of::<u32>()) as u64)
    }

    /// Enqueues what is staged.
    fn launch(&mut self, sms: NonZeroU32) {
        if !self.staged.is_any() {
            return;
        }
        let claims = std::mem::take(&mut self.staged.claims);
        let number = self.issued + 1;
        if let Err(why) = enqueue(self, number, sms) {
            tracing::error!(%why, "a GPU's driver does not take a copy");
            self.refused = Some(self::number(why));
        }
        self.issued = number;
        let staged = &mut self.staged;
        self.bytes = self.bytes.saturating_add(staged.bytes);
        self.flights.push_back(Flight {
            number,
            pieces: staged.pieces.len(),
            bytes: staged.bytes,
            _claims: claims,
        });
        staged.clear(|work| self.pieces.push_back(work));
    }

    /// The copy that is the first to end, if its number is this or less: it is not under way any more.
    fn land(&mut self, ended: u64) -> Option<Flight> {
        self.flights.front().filter(|flight| flight.number <= ended)?;
        let flight = self.flights.pop_front()?;
        self.bytes = self.bytes.saturating_sub(flight.bytes);
        Some(flight)
    }

    /// The number of the last copy that has ended. Acquire: with it come the bytes of all copies up to it.
    fn ended(&self) -> u64 {
        self.ended.word(0).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Whether the GPU has done all that it was given, of a copy that was refused, too.
    fn is_over(&self) -> bool {
        self.refused.is_some() && self.copier.stream().is_done().is_ok_and(|done| done)
    }

    /// Ends all copies as failed, and what is staged. Nothing of them runs any more.
    fn fail(&mut self, mut report: impl FnMut(WorkRequest)) {
        self.refused = None;
        self.flights.clear();
        self.bytes = 0;
        self.pieces.drain(..).for_each(&mut report);
        self.staged.clear(report);
    }
}

/// All queues of a GPU.
fn queues(device: &Device) -> Result<Vec<Queue>, Error> {
    let first = Copier::new(&Stream::new(device)?, Tuning::default())?;
    let others = (1..QUEUES).map(|_| first.beside()).collect::<Result<Vec<_>, _>>()?;
    std::iter::once(first).chain(others).map(Queue::new).collect()
}

/// One GPU.
#[derive(Debug)]
struct Gpu {
    known: Arc<Known>,
    /// Its place there.
    index: usize,
    queues: Vec<Queue>,
    /// Its warps for short pieces, unless it is to have none.
    standing: Option<Standing>,
    /// What no warp has copied, as they had gone: it has its turn before any other short piece.
    undone: VecDeque<Short>,
    /// It has failed, with this number of the driver's; nothing is enqueued any more.
    failed: Option<i32>,
}

impl Gpu {
    /// Whether its memory is to be read only behind a stream: queues wait for that, and no warp does.
    fn is_held(&self) -> bool {
        self.known.devices.get(self.index).is_some_and(One::is_held)
    }

    /// Whether the driver may keep us waiting that closes something, for as long as the GPU is busy with anything.
    fn is_closing(&self) -> bool {
        self.known.closer.is_busy()
    }

    /// Hands over what is staged in a queue, unless the driver may keep us waiting; returns whether nothing is staged there.
    fn clear(&mut self, at: usize, budget: NonZeroU32) -> bool {
        let is_any = |gpu: &Self| gpu.queues.get(at).is_some_and(|queue| queue.staged.is_any());
        if is_any(self) && !self.is_closing() {
            self.launch(at, budget);
        }
        !is_any(self)
    }

    /// Hands what is staged in a queue to the GPU.
    fn launch(&mut self, at: usize, budget: NonZeroU32) {
        if self.failed.is_some() {
            return;
        }
        let is_short = self.queues.get(at).is_some_and(|queue| queue.staged.is_short());
        if !is_short || self.standing.is_none() || self.is_held() {
            return self.enqueue(at, budget);
        }
        let Some((queue, standing)) = self.queues.get_mut(at).zip(self.standing.as_mut()) else {
            return;
        };
        let Some(short) = queue.staged.take_short() else { return };
        let left = if self.undone.is_empty() { standing.take(short).err() } else { Some(short) };
        if let Some(short) = left {
            queue.staged.put_short(short);
            self.enqueue(at, budget);
            if let Some(standing) = &mut self.standing {
                standing.send();
            }
        }
    }

    /// Hands over what is staged for a region, if it is so much that nothing is to be waited for.
    fn launch_if_enough(&mut self, reached: &Arc<Reached>, budget: NonZeroU32) {
        let staged = self.queues.iter().position(|queue| queue.staged.is_to(reached));
        let Some((at, queue)) = staged.and_then(|at| Some((at, self.queues.get(at)?))) else {
            return;
        };
        if spread::is_enough(queue.staged.bytes, self.under_way()) {
            self.clear(at, budget);
        }
    }

    /// Bytes that it is still to copy, of what it was handed.
    fn under_way(&self) -> u64 {
        self.queues.iter().fold(0, |all, queue| all.saturating_add(queue.bytes))
    }

    /// Enqueues what is staged in a queue.
    fn enqueue(&mut self, at: usize, budget: NonZeroU32) {
        if !self.queues.get(at).is_some_and(|queue| queue.staged.is_any()) {
            return;
        }
        let each = spread::processors(self.queues.iter().map(Queue::load), budget);
        if let Some(queue) = self.queues.get_mut(at) {
            queue.launch(each);
        }
    }

    /// Enqueues what no warp has copied, as far as there is room, and the driver does not keep us waiting.
    fn make_up(&mut self, budget: NonZeroU32) {
        while let Some(short) = self.undone.front() {
            let loads = self.queues.iter().map(Queue::load);
            let Some(at) = spread::choose(loads, short.work.peer) else { return };
            if self.is_closing() || !self.clear(at, budget) {
                return;
            }
            // What was staged there may have been refused.
            let Some(queue) = self.queues.get_mut(at).filter(|queue| queue.refused.is_none())
            else {
                return;
            };
            let Some(short) = self.undone.pop_front() else { return };
            queue.staged.put_short(short);
            self.enqueue(at, budget);
        }
    }
}

/// What is to become one copy.
#[derive(Debug)]
struct Staged {
    /// None: nothing is staged.
    claims: Claims,
    pieces: Vec<WorkRequest>,
    /// Where they are and go, as the GPU has it, unless they are runs of pages.
    batch: Batch<PIECES>,
    bytes: u64,
    /// They are runs of pages laid out so, the target's base as the GPU has it; their numbers are in the table already.
    run: Option<RunLayout>,
    /// Pages of all of them.
    pages: usize,
    growth: Growth,
}

impl Staged {
    fn new() -> Self {
        Self {
            claims: Claims::new(),
            pieces: Vec::with_capacity(PIECES),
            batch: Batch::new(),
            bytes: 0,
            run: None,
            pages: 0,
            growth: Growth::new(),
        }
    }

    /// Nothing is staged any more; what was is given to `take`.
    fn clear(&mut self, take: impl FnMut(WorkRequest)) {
        self.claims.clear();
        self.pieces.drain(..).for_each(take);
        self.batch.clear();
        self.bytes = 0;
        (self.run, self.pages, self.growth) = (None, 0, Growth::new());
    }

    /// Whether it is one piece that a warp copies which stands by.
    fn is_short(&self) -> bool {
        let is_one = self.run.is_none() && self.pieces.len() == 1;
        is_one && self.bytes <= u64::from(standby::SHORT_BYTES)
    }

    /// Takes that piece out again.
    fn take_short(&mut self) -> Option<Short> {
        let (work, Range { src, dst, .. }) = self.pieces.pop().zip(self.batch.only())?;
        self.batch.clear();
        self.bytes = 0;
        Some(Short { work, src, dst, claim: self.claims.pop()? })
    }

    /// Stages one piece where nothing is.
    fn put_short(&mut self, short: Short) {
        let Short { work, src, dst, claim } = short;
        self.batch.add(Range { src, dst, len: work.len });
        self.pieces.push(work);
        self.bytes = work.len;
        // There is room: nothing was staged.
        let _ = self.claims.push(claim);
    }

    /// Whether a run of so many pages, of so many bytes, can be part of one launch with what is staged.
    fn has_room(&self, pages: usize, bytes: u64) -> bool {
        let is_short = self.bytes.saturating_add(bytes) <= LAUNCH_BYTES;
        let is_alike = |run: RunLayout| {
            run.page_bytes.checked_mul(pages as u64).is_some_and(|all| all == bytes)
        };
        let fits = is_short && self.pages.saturating_add(pages) <= LAUNCH_PAGES;
        fits && self.run.is_some_and(is_alike)
    }

    /// Whether there is anything.
    fn is_any(&self) -> bool {
        !self.claims.is_empty()
    }

    /// Whether it goes to this region, too.
    fn is_to(&self, reached: &Arc<Reached>) -> bool {
        self.claims.iter().any(|claim| Arc::ptr_eq(&claim.0, reached))
    }

    /// Whether it may go to this region, too: it is another of the same peer's, in memory of the same kind. What a warp copies is left to it.
    fn may_go_to(&self, reached: &Arc<Reached>, peer: PeerId) -> bool {
        // What was opened alike lies near enough for one table.
        let is_alike =
            |it: &Reached| (it.home, it.outlives_owner) == (reached.home, reached.outlives_owner);
        let is_alike = self.claims.first().is_some_and(|claim| is_alike(&claim.0));
        let is_same = self.pieces.last().is_some_and(|work| work.peer == peer);
        is_alike && is_same && !self.is_short() && !self.claims.is_full()
    }

    /// Gives up the claim on a region that nothing goes to after all; `begun`: it was made for that.
    fn forgo(&mut self, begun: bool) {
        if begun {
            self.claims.pop();
        }
    }

    /// Whether a piece can be part of it.
    fn takes(&self, piece: Range) -> bool {
        self.run.is_none() && !self.pieces.is_empty() && self.batch.takes(piece)
    }
}

/// What became of a piece that was to be staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Staging {
    /// It will be reported.
    Taken,
    /// All queues are full.
    NoRoom,
    /// The region was withdrawn.
    Withdrawn,
    /// It cannot be done.
    Failed(WorkError),
}

/// The GPUs of an engine, if it uses any.
pub(super) type Copying = Option<Box<Gpus>>;

/// The GPUs of an engine, as its own thread uses them.
#[derive(Debug)]
pub(super) struct Gpus {
    known: Arc<Known>,
    gpus: Vec<Gpu>,
    sms: NonZeroU32,
    /// Pieces under way.
    flying: usize,
    /// When something ended last, or nothing was under way.
    progress: Time,
    /// All that was enqueued has been waited for.
    is_settled: bool,
}

impl Gpus {
    /// Prepares copies on GPUs that are open, each on at most `sms` SMs; `stands_by`: short ones by warps that do.
    pub(super) fn new(
        known: Arc<Known>,
        sms: NonZeroU32,
        stands_by: bool,
    ) -> Result<Self, (u32, Error)> {
        let gpu = |(index, One { device, streams, .. }): (usize, &One)| {
            let failed = |why| (device.ordinal(), why);
            let queues = queues(device).map_err(failed)?;
            let first = queues.first().filter(|_| stands_by);
            let standing = first.map(|queue| queue.copier.standby().map(Standing::new));
            streams
                .get_or_init(|| queues.iter().map(|queue| queue.copier.stream().clone()).collect());
            let (standing, undone) =
                (standing.transpose().map_err(failed)?, VecDeque::with_capacity(standby::SEATS));
            Ok(Gpu { known: Arc::clone(&known), index, queues, standing, undone, failed: None })
        };
        let gpus =
            known.devices.iter().enumerate().map(gpu).collect::<Result<_, (u32, Error)>>()?;
        Ok(Self { known, gpus, sms, flying: 0, progress: Time::ZERO, is_settled: false })
    }

    pub(super) fn known(&self) -> &Arc<Known> {
        &self.known
    }

    /// Waits for what is under way, for some seconds, before anything is closed. Nothing may be enqueued after.
    ///
    /// While something is being closed, by another engine, too, the driver keeps every other call waiting: if it does not come back from that, it is
    /// not asked.
    pub(super) fn settle(&mut self) {
        let known = &self.known;
        let may_ask = || known.closer.end(CLOSED_WITHIN) && known.is_free_within(CLOSED_WITHIN);
        if !self.is_settled && may_ask() {
            self.launch(false);
            self.settle_queues();
        }
    }

    /// If a GPU is stuck, what it may still write to stays claimed, and what is ours of that is kept for good (`Copier::settle`).
    fn settle_queues(&mut self) {
        self.is_settled = true;
        let start = Instant::now();
        for queue in self.gpus.iter_mut().flat_map(|gpu| &mut gpu.queues) {
            if !queue.copier.settle(STUCK_AFTER.saturating_sub(start.elapsed())) {
                std::mem::forget(std::mem::take(&mut queue.flights));
            }
        }
        for standing in self.gpus.iter_mut().filter_map(|gpu| gpu.standing.as_mut()) {
            standing.settle(STUCK_AFTER.saturating_sub(start.elapsed()));
        }
    }

    /// Ends all of it; `sessions`, after what they have given the GPUs to do.
    pub(super) fn end(mut self: Box<Self>, mut sessions: impl FnMut()) {
        self.settle();
        sessions();
        let known = Arc::clone(&self.known);
        known.closer.give(self);
        if !known.closer.end(CLOSED_WITHIN) {
            tracing::warn!(
                "a GPU is busy with something: its driver takes back what the engine had when that has ended"
            );
        }
    }

    /// Whether anything is under way, also to peers that are gone.
    pub(super) fn is_flying(&self) -> bool {
        self.flying > 0
    }

    /// Whether something is being closed: nothing is taken meanwhile.
    pub(super) fn is_closing(&self) -> bool {
        self.known.closer.is_busy()
    }

    /// Takes a piece to a region of a peer's; its range was checked. [`Gpus::launch`] is to be called before control goes
    /// back to the engine, and by each poll.
    pub(super) fn stage(
        &mut self,
        work: &WorkRequest,
        reached: &Arc<Reached>,
        sink: &impl Sink,
    ) -> Staging {
        let gpu = match Kind::of(work.src_key) {
            Kind::Gpu(index) => usize::from(index),
            Kind::Host => reached.home.unwrap_or(0),
            // A peer's word that its mailbox is a GPU's.
            Kind::Unreached => return Staging::Failed(WorkError::LocalAccess),
        };
        // Not to wait in the driver, nor to be overlooked at the end.
        if self.is_settled || self.is_closing() {
            return Staging::NoRoom;
        }
        // The region's owner has no part in that.
        if !reached.has_way(gpu) {
            return Staging::Failed(WorkError::Device(Errno::NXIO.raw_os_error()));
        }
        if work.run.count > 0 {
            return self.stage_run(work, gpu, reached, sink);
        }
        let Some(dst) = reached.address(gpu, work.dst, work.len) else {
            return Staging::Failed(WorkError::RemoteAccess);
        };
        if let Err(not) = reached.pin(work.len, std::iter::once(dst)) {
            return not;
        }
        let piece = Range { src: work.src, dst, len: work.len };
        let (queue, begun) = match self.begin(gpu, reached, work.peer, |it| it.takes(piece)) {
            Ok(it) => it,
            Err(not) => return not,
        };
        let staged = &mut queue.staged;
        if !staged.batch.add(piece) {
            // Neither what was asked about, nor the first.
            staged.forgo(begun);
            return Staging::Failed(WorkError::LocalAccess);
        }
        staged.pieces.push(*work);
        staged.bytes = staged.bytes.saturating_add(work.len);
        self.flying += 1;
        Staging::Taken
    }

    /// The queue of `gpu` that has a copy staged which takes more and goes to that region, or to others of the same peer's, or else one that
    /// begins another; and whether it did not go there before.
    fn begin(
        &mut self,
        gpu: usize,
        reached: &Arc<Reached>,
        peer: PeerId,
        takes: impl Fn(&Staged) -> bool,
    ) -> Result<(&mut Queue, bool), Staging> {
        let sms = self.sms;
        let state = self.gpus.get_mut(gpu).ok_or(Staging::Failed(WorkError::LocalAccess))?;
        if let Some(code) = state.failed {
            return Err(Staging::Failed(WorkError::Device(code)));
        }
        let find = |is: &dyn Fn(&Staged) -> bool| {
            let mut all = state.queues.iter();
            all.position(|queue| queue.staged.is_any() && is(&queue.staged))
        };
        let open = find(&|it| it.is_to(reached));
        let is_open = open.and_then(|at| state.queues.get(at)).is_some_and(|it| takes(&it.staged));
        if let Some(at) = open.filter(|_| is_open) {
            if !reached.may_continue() {
                return Err(Staging::Withdrawn);
            }
            return state.queues.get_mut(at).map(|it| (it, false)).ok_or(Staging::NoRoom);
        }
        let other = find(&|it| it.may_go_to(reached, peer) && takes(it));
        // At once: the GPU is not to wait until the next one is full, too.
        if let Some(full) = open
            && !state.clear(full, sms)
        {
            return Err(Staging::NoRoom);
        }
        let at = match other {
            Some(at) => at,
            None => {
                let loads = state.queues.iter().map(Queue::load);
                let at = spread::choose(loads, peer).ok_or(Staging::NoRoom)?;
                if !state.clear(at, sms) {
                    return Err(Staging::NoRoom);
                }
                at
            }
        };
        // What was staged there may have been refused: nothing is to end behind it as if it had been made.
        let taking = state.queues.get_mut(at).filter(|queue| queue.refused.is_none());
        let queue = taking.ok_or(Staging::NoRoom)?;
        let claim = Claim::new(reached).ok_or(Staging::Withdrawn)?;
        queue.staged.claims.push(claim).map_err(|_| Staging::NoRoom)?;
        Ok((queue, true))
    }

    /// As [`Gpus::stage`], of a run of pages.
    fn stage_run(
        &mut self,
        work: &WorkRequest,
        gpu: usize,
        reached: &Arc<Reached>,
        sink: &impl Sink,
    ) -> Staging {
        let count = usize::try_from(work.run.count).unwrap_or(usize::MAX);
        let mut joins = true;
        // Twice at most: the second time with nothing that is staged.
        loop {
            let takes =
                |it: &Staged| joins && it.pieces.len() < PIECES && it.has_room(count, work.len);
            let (queue, begun) = match self.begin(gpu, reached, work.peer, takes) {
                Ok(it) => it,
                Err(not) => return not,
            };
            let Some((sources, targets, staged)) = queue.next_table() else {
                queue.staged.forgo(begun);
                return Staging::Failed(WorkError::LocalAccess);
            };
            let tables = (sources.split_at_mut_checked(staged.pages))
                .zip(targets.split_at_mut_checked(staged.pages))
                .and_then(|((sources, more), (targets, others))| {
                    Some(((sources, more.get_mut(..count)?), (targets, others.get_mut(..count)?)))
                });
            let layout = tables.and_then(|(sources, targets)| {
                let run = sink.page_run(work, sources.1, targets.1)?;
                let last = largest(targets.1).map_or(0, u64::from);
                let span = run.dst_stride.checked_mul(last)?.checked_add(run.page_bytes)?;
                let dst_base = reached.address(gpu, run.dst_base, span)?;
                Some((RunLayout { dst_base, ..run }, sources, targets))
            });
            let Some((layout, sources, targets)) = layout else {
                staged.forgo(begun);
                return Staging::Failed(WorkError::RemoteAccess);
            };
            let place = |number: &u32| layout.dst_base + layout.dst_stride * u64::from(*number);
            if let Err(not) = reached.pin(layout.page_bytes, targets.1.iter().map(place)) {
                staged.forgo(begun);
                return not;
            }
            let all = match staged.run {
                Some(run) if run != layout => scale::join((run, layout), sources, targets),
                _ => Some(layout),
            };
            let Some(all) = all else {
                joins = false;
                staged.forgo(begun);
                continue;
            };
            staged.run = Some(all);
            staged.pages += count;
            staged.bytes =
                staged.bytes.saturating_add(layout.page_bytes.saturating_mul(count as u64));
            staged.pieces.push(*work);
            staged.growth.grew();
            self.flying += 1;
            if let Some(state) = self.gpus.get_mut(gpu) {
                state.launch_if_enough(reached, self.sms);
            }
            return Staging::Taken;
        }
    }

    /// Hands what is staged to GPUs, but for runs of pages that others may follow before their GPU has done what it has; `more`: whether
    /// others may.
    pub(super) fn launch(&mut self, more: bool) {
        if self.flying == 0 || self.is_settled {
            return;
        }
        for gpu in &mut self.gpus {
            let under_way = gpu.under_way();
            for at in 0..gpu.queues.len() {
                let Some(Queue { staged, .. }) = gpu.queues.get_mut(at) else { continue };
                let may_go_on = staged.run.is_some() && staged.growth.may_go_on();
                // For each: the launch of the one before took time, in which somebody may have begun to close something.
                let is_closing = gpu.known.closer.is_busy();
                if !spread::is_kept(more && may_go_on, is_closing, under_way) {
                    gpu.launch(at, self.sms);
                }
            }
        }
    }

    /// Reports the pieces that have ended since the last call; returns whether there were any. Idle, it costs a load.
    pub(super) fn poll(
        &mut self,
        now: Time,
        report: &mut impl FnMut(WorkRequest, Result<(), WorkError>),
    ) -> bool {
        if self.flying == 0 {
            self.progress = now;
            return false;
        }
        let before = self.flying;
        for gpu in &mut self.gpus {
            while let Some((short, ended)) = gpu.standing.as_mut().and_then(Standing::poll) {
                match ended {
                    Ended::Done => {
                        self.flying -= 1;
                        report(short.work, Ok(()));
                    }
                    Ended::NotDone => gpu.undone.push_back(short),
                }
            }
            if !self.is_settled {
                gpu.make_up(self.sms);
            } else {
                // Nothing is enqueued any more, and nothing of these was written: no warp has made them, or no queue has begun them.
                let undone = gpu.undone.drain(..).map(|short| short.work);
                let staged = gpu.queues.iter_mut().map(|queue| &mut queue.staged);
                let mut flush = |work| {
                    self.flying -= 1;
                    report(work, Err(WorkError::Flushed));
                };
                undone.for_each(&mut flush);
                staged.for_each(|staged| staged.clear(&mut flush));
            }
            for queue in &mut gpu.queues {
                if queue.flights.is_empty() {
                    continue;
                }
                // First: then all copies before the one that was refused have stored their numbers.
                let may_ask = queue.refused.is_some() && !self.known.closer.is_busy();
                let is_over = may_ask && queue.is_over();
                let ended = queue.ended();
                while let Some(flight) = queue.land(ended) {
                    for work in queue.pieces.drain(..flight.pieces.min(queue.pieces.len())) {
                        self.flying -= 1;
                        report(work, Ok(()));
                    }
                }
                if let Some(code) = queue.refused.filter(|_| is_over) {
                    queue.fail(|work| {
                        self.flying -= 1;
                        report(work, Err(WorkError::Device(code)));
                    });
                }
            }
        }
        if self.flying != before {
            self.progress = now;
        } else if now >= self.progress.after(LOOK_AFTER) && !self.is_closing() {
            // The driver may keep whoever asks it waiting for all that GPUs have to do.
            self.progress = now;
            self.look_for_failures(report);
        }
        self.flying != before
    }

    /// Ends what a GPU that has failed will never end: nothing of it runs any more.
    fn look_for_failures(&mut self, report: &mut impl FnMut(WorkRequest, Result<(), WorkError>)) {
        for gpu in &mut self.gpus {
            let asked = gpu.queues.iter().filter(|queue| !queue.flights.is_empty());
            let failures = asked.filter_map(|queue| queue.copier.stream().is_done().err());
            let standing = gpu.standing.iter().filter(|standing| standing.is_busy());
            let mut failures = failures.chain(standing.filter_map(Standing::failure));
            let Some(why) = failures.next() else { continue };
            let code = number(why);
            tracing::error!(%why, "a GPU has failed: nothing is copied by it any more");
            gpu.failed = Some(code);
            let standing = gpu.standing.iter_mut().flat_map(Standing::fail);
            for short in standing.chain(gpu.undone.drain(..)) {
                self.flying -= 1;
                report(short.work, Err(WorkError::Device(code)));
            }
            for queue in &mut gpu.queues {
                queue.fail(|work| {
                    self.flying -= 1;
                    report(work, Err(WorkError::Device(code)));
                });
            }
        }
    }
}

/// Enqueues a copy, and the storing of its number.
fn enqueue(queue: &mut Queue, number: u64, sms: NonZeroU32) -> Result<(), Error> {
    let release = Release::Store { word: queue.ended.address(), value: number };
    let staged = &queue.staged;
    if let Some(run) = staged.run {
        let (source_at, target_at) = queue.table_addresses(number);
        let pages = |base, stride, table| Pages { base, stride, table: Some(table) };
        let copy = PagedCopy {
            source: pages(run.src_base, run.src_stride, source_at),
            target: pages(run.dst_base, run.dst_stride, target_at),
            page_bytes: run.page_bytes,
            page_count: u32::try_from(staged.pages).unwrap_or(0),
        };
        // SAFETY: see `submit`.
        return unsafe { submit(queue, &copy, release, sms) };
    }
    let (source_at, target_at) = queue.table_addresses(number);
    let Some((sources, targets, staged)) = queue.next_table() else {
        return Err(Error::OutOfBounds { end: number, bytes: COPIES as u64 });
    };
    let (places, len) = match staged.batch.form() {
        Form::Ranges(_) => return enqueue_ranges(queue, release, sms),
        Form::List { places, len } => (places, len),
    };
    let source = tabulate(places.iter().map(|place| place.0), sources);
    let target = tabulate(places.iter().map(|place| place.1), targets);
    let page_count = u32::try_from(places.len()).unwrap_or(0);
    // Further apart than a table can say: one by one.
    let (Some(source), Some(target)) = (source, target) else {
        return enqueue_ranges(queue, release, sms);
    };
    let pages = |(base, stride), table| Pages { base, stride, table: Some(table) };
    let copy = PagedCopy {
        source: pages(source, source_at),
        target: pages(target, target_at),
        page_bytes: len,
        page_count,
    };
    // SAFETY: see `submit`.
    unsafe { submit(queue, &copy, release, sms) }
}

/// Enqueues what is staged range by range; the last announces them all.
fn enqueue_ranges(queue: &Queue, release: Release, sms: NonZeroU32) -> Result<(), Error> {
    let mut ranges = queue.staged.batch.form().ranges().peekable();
    while let Some(Range { src, dst, len }) = ranges.next() {
        let release = if ranges.peek().is_some() { Release::Nothing } else { release };
        // SAFETY: see `submit`.
        unsafe { submit(queue, &PagedCopy::contiguous(src, dst, len), release, sms)? };
    }
    Ok(())
}

/// # Safety
///
/// The ranges are those of pieces that were staged, or tables and words of the queue.
unsafe fn submit(
    queue: &Queue,
    copy: &PagedCopy,
    release: Release,
    sms: NonZeroU32,
) -> Result<(), Error> {
    // SAFETY: for `Copier::submit`, until the number has been read:
    // - sources lie in regions of ours, which stay registered until the pieces are reported (`Provider::post`);
    // - targets lie in regions of the peer's: their bounds were checked, the claims keep their owner from taking them back, and
    //   the flight keeps them open here;
    // - that nobody writes sources or uses targets meanwhile, and that they do not overlap, is the callers' of the engine
    //   to see to, as with a NIC; if they do not, the bytes are a mixture;
    // - tables and word are the queue's, in pinned memory, used by one copy at a time.
    unsafe { queue.copier.submit(copy, release, Method::Auto, sms) }.map(|_| ())
}

/// Writes addresses as page numbers; returns base and stride. `None`: they do not fit 32 bits.
fn tabulate(addresses: impl Iterator<Item = u64> + Clone, table: &mut [u32]) -> Option<(u64, u64)> {
    let base = addresses.clone().min()?;
    let bits = addresses.clone().fold(0, |bits, address| bits | (address - base));
    // The longest stride that leads to each of them; any, if there is one.
    let shift = bits.trailing_zeros().min(30);
    for (entry, address) in table.iter_mut().zip(addresses) {
        *entry = u32::try_from((address - base) >> shift).ok()?;
    }
    Some((base, 1 << shift))
}

impl Drop for Gpus {
    /// By the closer's thread, when the driver has come back, if it had not before.
    fn drop(&mut self) {
        if !self.is_settled {
            self.settle_queues();
        }
    }
}

/// What a peer is given that asks for a region of GPU memory. Its owner's alone, which lets go of it before the memory may be freed:
/// a reference that goes on one thread while another unmaps the same allocation breaks the driver's own lists (seen on
/// 580.159.04, of `cuMemRelease` beside `cuMemUnmap`; not of exports, nor of other allocations).
#[derive(Debug)]
pub(super) enum Shared {
    File(Arc<OwnedFd>),
    Handle([u8; immwire_cuda::IPC_HANDLE_BYTES]),
    /// Files of these, in several messages.
    Files(Allocations),
}

impl Shared {
    pub(super) fn new(device: &Device, found: &Found) -> Result<Self, Error> {
        if found.allocations > 1 {
            return Allocations::keep(device, found).map(Self::Files);
        }
        Ok(match immwire_cuda::hand_over(device, found.start)? {
            Handover::File(file) => Self::File(Arc::new(file)),
            Handover::Handle(handle) => Self::Handle(handle),
        })
    }

    /// How it is opened, and the file that goes with the answer.
    pub(super) fn by(&self) -> (By, Option<Arc<OwnedFd>>) {
        match self {
            Self::File(file) => (By::File, Some(Arc::clone(file))),
            Self::Handle(handle) => (By::Handle(*handle), None),
            // More are not registered.
            Self::Files(all) => (By::Files(u32::try_from(all.count()).unwrap_or(u32::MAX)), None),
        }
    }
}

/// What is handed to a peer that asks for files.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Handed<F> {
    /// These, and how long the allocation of each is.
    These(Vec<F>, Sizes),
    /// There are not so many.
    Nothing,
    /// There are, and the driver has a file of none of them: it had when the region was registered.
    Lacking,
    /// There are, and the driver would keep whoever asks it for files waiting.
    Busy,
}

/// Files of allocations from number `from` on, as many as go with one message.
pub(super) fn files_of(all: &Allocations, from: u32) -> Handed<OwnedFd> {
    gather(from, |number| all.export(number))
}

/// As many as go with one message of those that there are from number `from` on, up to the first that cannot be had.
fn gather<F>(
    from: u32,
    mut export: impl FnMut(usize) -> Result<Option<(F, u64)>, Error>,
) -> Handed<F> {
    let (mut files, mut sizes) = (Vec::with_capacity(FILES_MAX), Sizes::default());
    let Ok(from) = usize::try_from(from) else { return Handed::Nothing };
    for number in (from..).take(FILES_MAX) {
        match export(number) {
            Ok(Some((file, bytes))) => {
                files.push(file);
                sizes.push(bytes);
            }
            Ok(None) => break,
            // What there is goes all the same.
            Err(_) if !files.is_empty() => break,
            Err(why) => {
                tracing::debug!(%why, number, "an allocation cannot be handed to a peer");
                return Handed::Lacking;
            }
        }
    }
    if files.is_empty() { Handed::Nothing } else { Handed::These(files, sizes) }
}

/// What was received with an answer; `None`: that is not what it says, or not all.
pub(super) fn received(by: By, files: &[OwnedFd]) -> Option<Received<'_>> {
    match (by, files) {
        (By::Handle(handle), []) => Some(Received::Handle(handle)),
        (By::File, [file]) => Some(Received::File(file.as_fd())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_says_which_memory_it_is_of() {
        for kind in (0..UNREACHED - 1).map(Kind::Gpu).chain([Kind::Host, Kind::Unreached]) {
            let key = 7 << 32 | kind.bits() | 0x00ab_cdef;
            assert_eq!((Kind::of(key), id_of(key)), (kind, 0x00ab_cdef));
        }
    }

    /// Of a region however long, no more parts are touched than there are bytes to write.
    #[test]
    fn what_is_written_lies_in_its_parts_and_in_no_others() {
        let ends = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, (1 << 40) - 1, 1 << 40];
        for (offset, len) in ends.iter().flat_map(|&at| ends.map(|len| (at, len))) {
            let (first, last) = parts_of(offset, len);
            let (start, past) = (first as u64 * PART_BYTES, (last as u64 + 1) * PART_BYTES);
            assert!(start <= offset && offset + len <= past, "{offset} {len}");
            assert!(offset - start < PART_BYTES && past - (offset + len) <= PART_BYTES);
        }
    }

    #[test]
    fn a_table_leads_to_every_address_with_the_longest_stride() {
        let check = |addresses: &[u64]| {
            let mut table = [u32::MAX; 8];
            let (base, stride) = tabulate(addresses.iter().copied(), &mut table)?;
            for (address, entry) in addresses.iter().zip(&table) {
                assert_eq!(base + stride * u64::from(*entry), *address);
            }
            Some((base, stride))
        };
        assert_eq!(check(&[0x9000, 0x1000, 0x5000]), Some((0x1000, 0x4000)));
        assert_eq!(check(&[7, 8]), Some((7, 1)));
        assert_eq!(check(&[64]), Some((64, 1 << 30)));
        assert_eq!(check(&[64, 64]), Some((64, 1 << 30)));
        assert_eq!(check(&[0, 1 << 45, 1 << 44]), Some((0, 1 << 30)));
        // 2^33 bytes apart, and odd.
        assert_eq!(check(&[0, 1 << 33, 1]), None);
        assert_eq!(check(&[]), None);
    }

    #[test]
    fn allocations_come_in_order_and_no_more_than_there_are() {
        let described = Described { uuid: [0; 16], base: 0, len: 1, start: 0, whole: 4 };
        let files = |count| -> Vec<OwnedFd> {
            (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect()
        };
        for count in 2..6 {
            let closer = Arc::new(Closer::new(&[]));
            let mut arriving = Arriving { described, count, next: 0, ways: Vec::new(), closer };
            let mut come = 0;
            while let Some(next) = arriving.next() {
                assert_eq!(next, come);
                for more in 0..8 {
                    assert_eq!(arriving.has_room(&files(more)), come + more <= count, "{more}");
                }
                let some = (count - come).min(2);
                // Nobody gets at them.
                assert!(arriving.take(&files(some), &vec![1; some as usize]).is_err());
                come += some;
            }
            assert_eq!((come, arriving.has_room(&files(1))), (count, false));
        }
    }

    /// What cannot be had now is told from what there is not: a peer does not ask again for what it is refused.
    #[test]
    fn files_that_cannot_be_had_now_are_told_from_those_that_there_are_not() {
        const LACK: Error = Error::NoDriver;
        let export = |there: usize, fails: usize| {
            move |number: usize| match number {
                number if number == fails => Err(LACK),
                number => Ok((number < there).then_some((number, 7))),
            }
        };
        let max = u32::try_from(FILES_MAX).unwrap();
        for (there, from, fails) in (0..2 * max + 2)
            .flat_map(|there| (0..there + 2).map(move |from| (there, from)))
            .flat_map(|(there, from)| (from..there + 1).map(move |fails| (there, from, fails)))
        {
            // The last: none fails.
            let fails = if fails == there { u32::MAX } else { fails };
            let end = there.min(from.saturating_add(max)).min(fails);
            let handed = gather(from, export(there as usize, fails as usize));
            match handed {
                Handed::These(files, sizes) => {
                    let want: Vec<_> = (from as usize..end as usize).collect();
                    assert_eq!(files, want, "{there} {from} {fails}");
                    assert_eq!(sizes.as_slice(), vec![7; want.len()]);
                    assert!(!want.is_empty());
                }
                Handed::Lacking => assert!(from == fails && from < there),
                Handed::Nothing => assert!(from >= there && from != fails),
                Handed::Busy => panic!("who asks has seen to that"),
            }
        }
    }

    /// Who says more than is true is refused for that; what fails here is not the peer's fault.
    #[test]
    fn whose_fault_it_is_that_no_gpu_gets_at_a_region() {
        let (lie, lack) = (Error::OutOfBounds { end: 2, bytes: 1 }, Error::NoDriver);
        for (all, expected) in [
            (&[][..], NotReached::Failed),
            (&[lie], NotReached::Refused),
            (&[lie, lie], NotReached::Refused),
            (&[lack], NotReached::Failed),
            (&[lack, lack], NotReached::Failed),
            (&[lie, lack], NotReached::Refused),
            (&[lack, lie], NotReached::Refused),
        ] {
            assert_eq!(NotReached::of(all.iter().copied()), expected, "{all:?}");
        }
    }

    #[test]
    fn a_region_that_leaves_its_allocations_is_not_believed() {
        let described =
            |base, len, start, whole| Described { uuid: [0; 16], base, len, start, whole };
        for (base, len, start, whole) in (0..4).flat_map(|b| {
            (0..4).flat_map(move |l| (0..4).flat_map(move |s| (0..4).map(move |w| (b, l, s, w))))
        }) {
            let inside = len > 0 && base >= start && base + len <= start + whole;
            assert_eq!(described(base, len, start, whole).is_sound(), inside);
        }
        assert!(!described(u64::MAX, u64::MAX, 0, u64::MAX).is_sound());
    }
}
