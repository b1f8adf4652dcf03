//! What a transport must do to carry an engine: post, poll, register, connect, abort.
//!
//! The engine is generic over a [`Provider`], so that the data path is dispatched statically. A
//! provider decides nothing about plans, counts, credits or the life of a peer: the core does. It
//! moves the bytes of a [`WorkRequest`], reports what became of it, and tells what arrived.
//!
//! # Contract
//!
//! 1. *Exactly once, in any order.* Each accepted piece is reported exactly once by
//!    [`Sink::work_done`]; its immediate, if it has one, is reported exactly once at the peer.
//! 2. *Visibility.* When [`Sink::immediate`] is called, the bytes of that write are visible to the
//!    calling thread, and so to everybody who synchronises with it.
//! 3. *Reuse.* When [`Sink::work_done`] is called, with success or not, nothing reads the source any more;
//!    with success, nothing writes the destination on behalf of that piece. After a failure a transport of
//!    queues and networks may still deliver what it had sent, until the receiver ends the session or
//!    withdraws the region: that is the receiver's to rely on.
//! 4. *No blocking.* `post`, `poll` and `arm` do not wait for a peer.
//! 5. *A path may break.* A path is what leads from one of our NICs to one of a peer's. When it breaks,
//!    [`Sink::path_broken`] says so, and the provider keeps the pieces in flight on it, whose fate is
//!    unknown: bytes and immediates of theirs may still arrive. Nothing reads their sources any more.
//!    Each is reported by [`Provider::settle`], as done or as undelivered, or by `abort` or
//!    `disconnect` as failed. The path is restored only after that, and only if it works. `post` refuses
//!    what is for a broken path, and `settle` of a path with nothing in flight reports nothing and is no
//!    error. A transport whose paths do not break while the peer is there has none of it.
//! 6. *Room for what keeps a connection.* Of transfers a NIC is given at most [`NicLimits::queue_depth`] pieces at
//!    a time. Beside these it has room for [`NOTES_PER_PEER`](immwire_core::group::NOTES_PER_PEER)
//!    notes ([`Token::is_note`]: heartbeats, asks, answers) to each peer, or for as many to some peers as its queues are
//!    long enough for. So peers that take nothing do not cost the connections to the others.
//!
//! 7. *Runs of pages.* A piece whose [`WorkRequest::run`] counts pages is not one range: it is as many pages,
//!    anywhere in the two regions, and one piece in every other respect. [`Sink::page_run`] says where they lie,
//!    from `post` on until the piece is reported; a piece of which it says nothing is reported as failed. Only
//!    NICs all of which say that they take more than one page in a piece, of those that lead to the peer, are given any.
//!
//! 8. *At once.* A transport that has written when the call returns, and whose paths do not break, can say so
//!    ([`Provider::AT_ONCE_BYTES`]): then small writes that nothing stands before are made by [`Provider::write_at_once`],
//!    and are never in flight. It does not block, and reads the source only until it returns.
//!
//! Every provider runs the suite in `tests/conformance`.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use immwire_core::group::{Token, WorkError, WorkRequest};
use immwire_core::id::{MAX_NICS, NicIndex, PeerId, Time};
use immwire_core::nic::NicState;
use immwire_core::peer::DownReason;
use immwire_core::plan::{Piece, RunLayout};
use immwire_core::port::NoRoute;
use immwire_core::receipt::MAX_RECEIPT_BYTES;
use immwire_core::region::{LocalMr, MrDesc, Rights};
use immwire_core::wire::{Hello, NetAddr, Refusal};

/// A NIC as its provider knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicInfo {
    /// For people: `shm0`, `mlx5_2`.
    pub name: String,
    /// Gigabits per second; relative speeds decide how work is shared out.
    pub speed_gbps: u32,
    /// What it can do.
    pub limits: NicLimits,
}

/// What one NIC can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicLimits {
    /// The largest piece it takes, in bytes.
    pub max_message_bytes: u64,
    /// The smallest piece worth a NIC of its own, in bytes.
    pub min_piece_bytes: u64,
    /// Pieces of transfers in flight; notes come beside them, see the [contract](self).
    pub queue_depth: u16,
    /// Bytes that travel inside the work request.
    pub inline_bytes: u32,
    /// Source ranges that one piece may gather.
    pub max_sge: u32,
    /// Bytes to be handed over at once, before other NICs and commands have a turn: little where posting copies.
    pub batch_bytes: u64,
    /// Small pieces that it is told of together while as many are under way, where telling it costs more than they do; at most 32. 1:
    /// of each at once.
    pub together: u16,
    /// Pages that one piece may carry without being adjacent, on either side: 1 for a NIC that takes no
    /// runs of pages, else at most 255 are used.
    pub pages_per_piece: u16,
}

impl NicLimits {
    /// For transports that copy, or to which it does not matter.
    pub const BATCH_BYTES: u64 = 1 << 20;
}

/// A transport. Owned and called by one thread: the engine's, or the caller's in polled mode.
pub trait Provider: Send + 'static {
    /// The registrar, shared with all threads of the application.
    type Memory: Memory;

    /// The NICs, in index order; there are 1 to 8, and they do not change.
    fn nics(&self) -> &[NicInfo];

    /// The registrar.
    fn memory(&self) -> &Arc<Self::Memory>;

    /// What peers need to reach this engine.
    fn address(&self) -> NetAddr;

    /// For each of the NICs those of a peer's to which no path leads, a bit each, whoever the peer is. Nothing is posted
    /// there. Usually none.
    fn unreached(&self) -> [u8; MAX_NICS] {
        [0; MAX_NICS]
    }

    /// The NICs of the engine at this address as far as they lead here: those that do not have no speed.
    fn nics_at(&self, address: &NetAddr) -> heapless::Vec<NicState, MAX_NICS> {
        nic_states(address)
    }

    /// Whether sources in GPUs' memory are read for this peer by what knows no streams, a NIC: what they are to wait for
    /// ([`Memory::behind`]) is waited for before they are posted.
    fn reads_gpus(&self, peer: PeerId) -> bool {
        let _ = peer;
        false
    }

    /// The longest write that [`Provider::write_at_once`] makes; 0: none.
    const AT_ONCE_BYTES: u64 = 0;

    /// Makes a write with an immediate on `nic` before it returns, with all that [`Provider::post`] and a success promise.
    /// `false`: it did nothing, since something is to be found out, waited for or reported first, as a stream is that a GPU's
    /// memory may be behind.
    #[inline(always)]
    fn write_at_once(&mut self, nic: NicIndex, piece: &Piece) -> bool {
        let _ = (nic, piece);
        false
    }

    /// Posts a prefix of `work`, in order, on `nic`; returns how many pieces were accepted. They may
    /// complete at once or at a later poll.
    fn post<S: Sink>(&mut self, nic: NicIndex, work: &[WorkRequest], sink: &mut S) -> usize;

    /// Reports what has happened since the last call; a bounded amount. Returns whether there was
    /// anything.
    fn poll<S: Sink>(&mut self, now: Time, sink: &mut S) -> bool;

    /// Starts to connect, at `now`: the last poll may have been long ago. The outcome is [`Sink::connected`] or
    /// [`Sink::disconnected`].
    ///
    /// # Errors
    ///
    /// [`ConnectError`]: the address cannot be reached from here; nothing was started.
    fn connect(
        &mut self,
        now: Time,
        peer: PeerId,
        address: &NetAddr,
        hello: &Hello,
    ) -> Result<(), ConnectError>;

    /// The engine ends: waits, for some seconds at most, for what devices do of what was posted, before anything goes that they use. What is
    /// posted after need not begin. Called once.
    fn quiesce(&mut self) {}

    /// Drops the connection. What is in flight to the peer is reported as failed, here or at later polls;
    /// nothing else of the peer is reported any more, and nothing more is written to it.
    fn disconnect<S: Sink>(&mut self, peer: PeerId, sink: &mut S);

    /// Forces every piece in flight to the peer to a reported end, those that were not begun to [`Sink::undelivered`] if it can. The connection may be
    /// lost by it.
    fn abort<S: Sink>(&mut self, peer: PeerId, sink: &mut S);

    /// The peer says that this path of its broke. Sees to it that nothing it posted there lands here any
    /// more, reports the immediates that did, and returns what [`Provider::settle`] of the peer's needs
    /// to tell which they were. Called once for each break, also for one of which nothing is known here.
    ///
    /// # Errors
    ///
    /// [`Unfenced`]: this transport cannot know.
    fn fence<S: Sink>(
        &mut self,
        peer: PeerId,
        path: RemotePath,
        sink: &mut S,
    ) -> Result<Receipt, Unfenced> {
        let _ = (peer, path, sink);
        Err(Unfenced::Unknown)
    }

    /// The peer's receipt for a broken path of ours: reports each piece that was in flight there, by
    /// [`Sink::work_done`] if it had arrived, else by [`Sink::undelivered`], in the order of posting.
    ///
    /// # Errors
    ///
    /// [`Unfenced`]: the receipt makes no sense, or comes too late; nothing was reported.
    fn settle<S: Sink>(
        &mut self,
        peer: PeerId,
        path: Path,
        receipt: &Receipt,
        sink: &mut S,
    ) -> Result<(), Unfenced> {
        let _ = (peer, path, receipt, sink);
        Err(Unfenced::Unknown)
    }

    /// Becomes readable when there is something to poll, after [`Provider::arm`] returned `true`.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Asks for `fd` to be signalled. `false`: there is something to poll right now.
    fn arm(&mut self) -> bool;

    /// Withdraws [`Provider::arm`]; called on waking.
    fn disarm(&mut self);
}

/// A peer's NICs as the core sees them.
pub(crate) fn nic_states(address: &NetAddr) -> heapless::Vec<NicState, MAX_NICS> {
    let states = address.nics().iter();
    states.map(|nic| NicState { speed: nic.speed_gbps, healthy: true }).collect()
}

/// Where a provider reports to.
pub trait Sink {
    /// A piece ended.
    fn work_done(&mut self, nic: NicIndex, token: Token, outcome: Result<(), WorkError>);

    /// An immediate of `peer`'s arrived, and the bytes that it announces are visible.
    fn immediate(&mut self, nic: NicIndex, peer: PeerId, imm: u32);

    /// An engine wants to connect. Returns the peer it becomes, and our answer. Called at most once for
    /// each call, however often its bytes arrive: the second time the call would be stale. Calls may
    /// arrive in any order, and after the caller has given them up: if it does not take the answer, the
    /// connection is to be reported as lost.
    ///
    /// # Errors
    ///
    /// The reason to be sent back.
    fn incoming(&mut self, hello: &Hello) -> Result<(PeerId, Hello), Refusal>;

    /// A connection that was started is up.
    fn connected(&mut self, peer: PeerId, hello: &Hello);

    /// A connection was lost, or never came to be. What was in flight has been reported, and all immediates of writes that the
    /// peer had done, if it left by itself.
    fn disconnected(&mut self, peer: PeerId, reason: DownReason);

    /// One of our NICs was lost, or is back. Its paths are reported one by one.
    fn nic_changed(&mut self, nic: NicIndex, healthy: bool);

    /// A path broke: what is in flight on it has an unknown fate, and nothing is to be posted there.
    fn path_broken(&mut self, peer: PeerId, path: Path);

    /// A path that broke, and was settled since, can be posted on again.
    fn path_restored(&mut self, peer: PeerId, path: Path);

    /// A piece of a broken path did not arrive, and never will: it may be posted on another. Or it was not begun when its peer was aborted.
    fn undelivered(&mut self, work: &WorkRequest);

    /// What a run of pages in flight is made of: copies the numbers of its pages into the first
    /// `work.run.count` of `src` and of `dst`, and returns where pages of which number lie. Takes no lock.
    /// O(pages).
    ///
    /// `None`, whatever the slices hold then, if the work is no run, or not in flight, or a slice is too short.
    fn page_run(&self, work: &WorkRequest, src: &mut [u32], dst: &mut [u32]) -> Option<RunLayout>;

    /// Whether more is planned for this NIC than was posted so far. So who gathers pieces may wait for it, though not for long: it
    /// may be for another peer, and wait for something itself.
    fn has_more(&self, nic: NicIndex) -> bool;
}

/// What leads from one of our NICs to one of a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Path {
    /// Our NIC.
    pub nic: NicIndex,
    /// The peer's.
    pub remote_nic: NicIndex,
}

/// What leads from one of a peer's NICs to one of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemotePath {
    /// The peer's NIC.
    pub from: NicIndex,
    /// Ours.
    pub to: NicIndex,
}

/// What arrived over a path before it was fenced, as the two providers understand it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Receipt(pub heapless::Vec<u8, MAX_RECEIPT_BYTES>);

/// It cannot be said what became of the pieces on a broken path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfenced {
    /// It is not known. The peer is to be aborted.
    #[error("it is not known what arrived over the broken path")]
    Unknown,
    /// The peer is leaving by itself: [`Sink::disconnected`] follows, with the reason.
    #[error("the peer is leaving")]
    Leaving,
}

/// Pinned memory of the host, as [`immwire_cuda::PinnedMemory`]; given back by a thread of the engine's, since the driver waits
/// for GPUs first.
pub struct PinnedPage {
    /// Until it is dropped.
    memory: Option<immwire_cuda::PinnedMemory>,
    give_back: Box<dyn Fn(immwire_cuda::PinnedMemory) + Send + Sync>,
}

impl fmt::Debug for PinnedPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedPage").field(&self.memory).finish()
    }
}

impl PinnedPage {
    pub(crate) fn new(
        memory: immwire_cuda::PinnedMemory,
        give_back: impl Fn(immwire_cuda::PinnedMemory) + Send + Sync + 'static,
    ) -> Self {
        Self { memory: Some(memory), give_back: Box::new(give_back) }
    }

    /// The first byte, for GPUs and for the CPU.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, immwire_cuda::PinnedMemory::address)
    }

    /// The 8 bytes at `offset`; `None` where there are none, or it is no multiple of 8.
    #[must_use]
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        self.memory.as_ref()?.word(offset).ok()
    }
}

impl Drop for PinnedPage {
    fn drop(&mut self) {
        self.memory.take().into_iter().for_each(&self.give_back);
    }
}

/// A peer's region of GPU memory, as kernels of one of our GPUs reach it. The memory stays until this is dropped, also when its
/// owner has given it back, or is gone: then nobody reads there any more.
#[derive(Debug, Clone)]
pub struct Window {
    address: u64,
    _opened: Arc<immwire_cuda::Opened>,
}

impl Window {
    pub(crate) const fn new(address: u64, opened: Arc<immwire_cuda::Opened>) -> Self {
        Self { address, _opened: opened }
    }

    /// What stands for the region's first byte.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }
}

/// Drops, on a thread of the engine's, what the driver of a GPU takes back only when that is idle.
pub type GiveBack = Arc<dyn Fn(Box<dyn Send>) + Send + Sync>;

/// Registration of memory, from any thread and off the data path.
pub trait Memory: Send + Sync + 'static {
    /// Memory that peers on this host can map, zeroed.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    fn alloc(&self, bytes: usize) -> Result<Registered, RegisterError>;

    /// The same for the CPU and NICs alone: no GPU of this process reads or writes there, and so no GPU's driver is asked for it. May be
    /// called by the engine's thread.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    fn alloc_host(&self, bytes: usize) -> Result<Registered, RegisterError> {
        self.alloc(bytes)
    }

    /// Memory for messages from one peer, zeroed, as [`Memory::alloc_host`] does; it may have more behind it, which is the
    /// transport's own. `peer` is what is known of the peer's address.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    fn alloc_mailbox(&self, bytes: usize, peer: &NetAddr) -> Result<Registered, RegisterError> {
        let _ = peer;
        self.alloc_host(bytes)
    }

    /// Memory of GPU `ordinal` of this process, zeroed, that peers on this host can open.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; [`RegisterError::NoGpu`] where a transport reaches none.
    fn alloc_gpu(&self, ordinal: u32, bytes: usize) -> Result<Registered, RegisterError> {
        let _ = bytes;
        Err(RegisterError::NoGpu { ordinal })
    }

    /// Zeroed host memory that all GPUs reach at the CPU's address, for words.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Gpu`]; [`RegisterError::NoGpus`] where no GPU is used.
    fn pin(&self, bytes: usize) -> Result<PinnedPage, RegisterError> {
        let _ = bytes;
        Err(RegisterError::NoGpus)
    }

    /// By what memory of GPUs is given back without waiting for these; none where no GPU is used.
    fn give_back(&self) -> Option<GiveBack> {
        None
    }

    /// Copies `len` bytes between a region of GPU memory, from `offset` on, and `host`; waits for it.
    ///
    /// # Safety
    ///
    /// The range lies in the region, which is registered, and stays so until the GPU has gone on if it times out; the host's is valid as
    /// a slice, one to be written if `to_host`.
    ///
    /// # Errors
    ///
    /// [`immwire_cuda::Error::KeptWaiting`], and nothing was copied; what the driver answers, and part may have been; [`immwire_cuda::Error::TimedOut`], and then the GPU may use the
    /// region's range later, but not the host's; [`immwire_cuda::Error::NoDriver`] where a transport reaches no GPU.
    unsafe fn copy_gpu(
        &self,
        region: &Registered,
        offset: usize,
        host: *mut u8,
        len: usize,
        to_host: bool,
    ) -> Result<(), immwire_cuda::Error> {
        let _ = (region, offset, host, len, to_host);
        Err(immwire_cuda::Error::NoDriver)
    }

    /// Registers the caller's memory. A transport that reaches GPUs finds out by itself whether it is of one.
    ///
    /// # Safety
    ///
    /// `len` bytes from `ptr` are mapped, and stay so until [`Memory::revoke`] has returned `Ok`, be it after the provider has been dropped. Where
    /// the rights let no peer write, or only NICs do, not peers' processors and GPUs, they stay so until then or until it has been dropped.
    /// Peers write there at any time, if the rights say so.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError>;

    /// The same, of the host's memory, for the CPU and NICs alone, as [`Memory::alloc_host`].
    ///
    /// # Safety
    ///
    /// As for [`Memory::register`].
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    unsafe fn register_host(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, RegisterError> {
        // SAFETY: our caller's promise.
        unsafe { self.register(ptr, len, rights) }
    }

    /// Holds back the copies of GPU `ordinal` that are enqueued from now on, whenever they were submitted, until what is in `stream` now is done. Where NICs
    /// read its memory, they know no streams: then [`Memory::behind`] has one more for what is submitted from now on.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of that GPU's primary context.
    ///
    /// # Errors
    ///
    /// [`RegisterError::NoGpu`], [`RegisterError::Gpu`].
    unsafe fn after_stream(&self, ordinal: u32, stream: *mut c_void) -> Result<(), RegisterError> {
        let _ = stream;
        Err(RegisterError::NoGpu { ordinal })
    }

    /// How many streams a source in the memory of GPU `ordinal` is to wait for that NICs read, counted from the first; 0 if
    /// all are through. A load or two.
    fn behind(&self, ordinal: u32) -> u64 {
        let _ = ordinal;
        0
    }

    /// Whether the first `behind` streams that GPU `ordinal` was to wait for are through.
    ///
    /// # Errors
    ///
    /// The driver's: the GPU has failed.
    fn is_through(&self, ordinal: u32, behind: u64) -> Result<bool, immwire_cuda::Error> {
        let _ = (ordinal, behind);
        Ok(true)
    }

    /// A stream of the application's, of GPU `ordinal`; null is the default one.
    ///
    /// # Safety
    ///
    /// As for [`immwire_cuda::Stream::borrow`].
    ///
    /// # Errors
    ///
    /// [`RegisterError::NoGpu`].
    unsafe fn stream(
        &self,
        ordinal: u32,
        stream: *mut c_void,
    ) -> Result<immwire_cuda::Stream, RegisterError> {
        let _ = stream;
        Err(RegisterError::NoGpu { ordinal })
    }

    /// Where kernels of GPU `ordinal` reach a peer's region, once something was written there from here. `None`: nothing was,
    /// it was withdrawn, or it is not memory that may be reached so.
    fn window(&self, peer: PeerId, dst: &MrDesc, ordinal: u32) -> Option<Window> {
        let _ = (peer, dst, ordinal);
        None
    }

    /// Whether descriptors count the addresses of a region from 0, not from where it is.
    fn counts_from_zero(&self) -> bool {
        false
    }

    /// Whether pages from one region to another may be handed over in runs, where the NICs take any.
    fn takes_runs(&self, src: &LocalMr, dst: &MrDesc) -> bool {
        let _ = (src, dst);
        true
    }

    /// Withdraws a region from peers. `Ok`: no peer writes to it any more, nor ever will.
    ///
    /// # Errors
    ///
    /// [`RevokeError`]: a peer was still writing after `patience`; it may be tried again.
    fn revoke(&self, region: &Registered, patience: Duration) -> Result<(), RevokeError>;

    /// Forgets a region that was withdrawn, and unmaps it if [`Memory::alloc`] made it.
    fn release(&self, region: Registered);

    /// The same, but waits for no GPU: of a region that nobody waits to be rid of, as its last handle was dropped, by the engine's thread
    /// perhaps. Its memory stays until the engine has ended, or nobody uses it any more.
    fn release_later(&self, region: Registered) {
        self.release(region);
    }
}

/// A registered range.
#[derive(Debug)]
pub struct Registered {
    /// First byte.
    pub ptr: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// For us, as a source.
    pub local: LocalMr,
    /// For peers, as a destination.
    pub desc: MrDesc,
    /// The provider's own name for it.
    pub id: u32,
    /// Whose memory it is.
    pub place: Place,
}

/// Whose memory a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Place {
    /// The host's: its addresses can be followed.
    #[default]
    Host,
    /// That of a GPU, by its number in this process: its addresses are for CUDA's calls.
    Gpu(u32),
}

// SAFETY: the pointer is an address that this type never follows; whoever does (`Region`) states
// its own contract.
unsafe impl Send for Registered {}
// SAFETY: as above; all fields are read only.
unsafe impl Sync for Registered {}

/// Hears nothing: for a provider that ends, whose engine is not there any more.
pub(crate) struct Nobody;

impl Sink for Nobody {
    fn work_done(&mut self, _: NicIndex, _: Token, _: Result<(), WorkError>) {}

    fn immediate(&mut self, _: NicIndex, _: PeerId, _: u32) {}

    fn incoming(&mut self, _: &Hello) -> Result<(PeerId, Hello), Refusal> {
        Err(Refusal::ShuttingDown)
    }

    fn connected(&mut self, _: PeerId, _: &Hello) {}

    fn disconnected(&mut self, _: PeerId, _: DownReason) {}

    fn nic_changed(&mut self, _: NicIndex, _: bool) {}

    fn path_broken(&mut self, _: PeerId, _: Path) {}

    fn path_restored(&mut self, _: PeerId, _: Path) {}

    fn undelivered(&mut self, _: &WorkRequest) {}

    fn page_run(&self, _: &WorkRequest, _: &mut [u32], _: &mut [u32]) -> Option<RunLayout> {
        None
    }

    fn has_more(&self, _: NicIndex) -> bool {
        false
    }
}

/// Why memory could not be registered.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// A region has at least one byte.
    #[error("a region of zero bytes cannot be registered")]
    Empty,
    /// All entries of the region table are taken.
    #[error("all {capacity} regions are in use: drop some, or register larger ranges")]
    TableFull {
        /// Entries there are.
        capacity: usize,
    },
    /// The engine does not use that GPU: it is to be named when the engine is built.
    #[error("the engine does not use GPU {ordinal}: name it when the engine is built")]
    NoGpu {
        /// Its number in this process.
        ordinal: u32,
    },
    /// The engine uses no GPU: some are to be named when the engine is built.
    #[error("the engine uses no GPU: name those that it is to use when it is built")]
    NoGpus,
    /// The staging pool has no room for another peer.
    #[error("the staging pool has room for {areas} peers, which are there: give it more bytes")]
    NoArea {
        /// For so many it has.
        areas: u16,
    },
    /// The memory is a GPU's or is to be pinned for one, and cannot be.
    #[error("{0}")]
    Gpu(immwire_cuda::Error),
    /// The stream is being captured: its order is that of a graph, which nobody knows yet.
    #[error(
        "the stream is being captured into a graph, which has no order yet: end the capture first"
    )]
    Capturing,
    /// NICs do not reach the GPU's memory.
    #[error("{nics} cannot be given memory of GPU {ordinal}: {why}")]
    NotDirect {
        /// What the engine's transport calls them.
        nics: String,
        /// The GPU's number in this process.
        ordinal: u32,
        /// Why, and what to do.
        why: String,
    },
    /// The kernel said no.
    #[error("{call} of {bytes} bytes: {source}{}", pin_hint(call, source.raw_os_error()))]
    Os {
        /// The system call.
        call: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// Why.
        source: std::io::Error,
    },
}

/// Calls that pin memory: what is registered, and, in drivers such as ConnectX's, the queues themselves.
const PINS: [&str; 8] = [
    "ibv_reg_mr",
    "ibv_create_cq",
    "ibv_create_cq_ex",
    "ibv_resize_cq",
    "ibv_create_srq",
    "ibv_create_qp",
    "ibv_create_qp_ex",
    "fi_mr_reg",
];

/// What to say behind an error of a call: which limit it may have met, if it pins memory and found none.
pub(crate) fn pin_hint(call: &str, errno: Option<i32>) -> &'static str {
    let pins = PINS.contains(&call);
    let why = errno.map(|errno| std::io::Error::from_raw_os_error(errno).kind());
    let lacks = why == Some(std::io::ErrorKind::OutOfMemory);
    if pins && lacks { " (ulimit -l may be too low)" } else { "" }
}

/// Why a region could not be withdrawn yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{peer} is still writing to the region; the memory must stay valid")]
pub struct RevokeError {
    /// Who.
    pub peer: PeerId,
}

/// Why a connection could not be started.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address names another transport. Engines that reach peers of their own host by shared memory, and those that do
    /// not, are not each other's peers.
    #[error("the address is for {found}, this engine uses {expected}")]
    OtherProvider {
        /// Transport of the address.
        found: String,
        /// Ours.
        expected: &'static str,
    },
    /// The address is this engine's own.
    #[error("an engine cannot connect to itself")]
    Myself,
    /// Nobody listens there: the process is gone, runs elsewhere, or in another network namespace.
    #[error(
        "nobody listens at the address: is the peer running, on this host and in this network namespace? ({source})"
    )]
    Unreachable {
        /// What the kernel said.
        source: std::io::Error,
    },
    /// Somebody listens there, who runs as another user or whom this process may not call.
    #[error(
        "the peer is not to be called from here: have both ends run as the same user of one host, or give both the same group key, as is needed where that user has no number of its own in a container ({source})"
    )]
    Unauthorised {
        /// What the kernel said, or would have.
        source: std::io::Error,
    },
    /// No NIC of this engine reaches one of the peer's, of whatever the network is made.
    #[error("none of our NICs reaches one of the peer's: {why}")]
    NoRoute {
        /// Of the pair that lacks least.
        why: NoRoute,
    },
    /// The address is this engine's own by now: whoever had it is gone.
    #[error("the peer is gone, and this engine has its address: add the peer by its new one")]
    Ours,
    /// This engine lacks something for the call. Whether the peer is there is not known.
    #[error("the call cannot begin here: {why}")]
    Local {
        /// What.
        why: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The address is of an engine on libfabric, as this one is, but by another of its providers, or of another family of
    /// addresses.
    #[error(
        "this engine is on libfabric's provider {provider} ({domain}), and the address is of another one, or of another \
         family: name the same provider on both ends, and domains whose addresses are of one family (IPv4 or IPv6)"
    )]
    OtherNetwork {
        /// Ours.
        provider: String,
        /// Ours, of the first NIC.
        domain: String,
    },
    /// The address is well formed, but not one that this provider made.
    #[error("the address is damaged: {what}")]
    Malformed {
        /// What is wrong with it.
        what: &'static str,
    },
}
