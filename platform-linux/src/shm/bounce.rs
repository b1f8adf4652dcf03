//! Bytes for memory that a peer can neither map nor write through the kernel: a ring of records that
//! the owner of the memory takes out and copies to their place itself.
//!
//! ```text
//!   record: head, 64 bytes | data, 0 to 64 KiB, padded to 64
//!   head:   key | destination | len (32), flags (8), nic (8) | immediate | status
//! ```
//!
//! A piece is one or more records in a row; the last may carry the immediate, which the reader
//! delivers if no record of the piece was refused. The reader writes a record's status, then moves the
//! tail past it; that the tail has moved is the completion.
//!
//! # Invariants
//!
//! - The writer's only copy of what it wrote is its own: of the ring it reads status words and the
//!   tail, and a tail that is not between the last one and the head ends the session.
//! - The reader copies a head out before it looks at it, and checks that the record lies between tail
//!   and head; whether key and destination are good is decided by [`ShmMemory::deliver`].
//! - The ring has a grant of its own, which the writer withdraws to call back what lies in it; the
//!   reader takes no record without it (`immwire_core::hazard`).
//! - Positions are counts of bytes that never wrap in practice, and are multiples of [`ALIGN`].
//!
//! The models in `verification/loom` run this text on loom's words, with a cell for the data of a record.

use crate::sync::{AtomicU64, Ordering};
use std::collections::VecDeque;

use immwire_core::group::{WorkError, WorkRequest};
use immwire_core::hazard;
use immwire_core::id::NicIndex;

use super::copy::copy;
use super::memory::ShmMemory;
use super::segment::{BOUNCE_BYTES, Half};

const ALIGN: u64 = 64;
const HEAD_BYTES: u64 = 64;
/// The longest data of a record: long enough to keep the overhead small, short enough that writer and
/// reader work at the same time.
const RECORD_BYTES: u64 = 64 << 10;
const RING_BYTES: u64 = BOUNCE_BYTES as u64;
/// Pieces that may be under way in one direction.
const JOBS_MAX: usize = 256;

const FIRST: u64 = 1;
const LAST: u64 = 2;
const WITH_IMM: u64 = 4;

/// The value of the ring's grant, while there is one.
pub(super) const OPEN: u64 = 1;

const DELIVERED: u64 = 1;
const REFUSED: u64 = 2;

/// The other side wrote a position or a record that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Corrupt;

/// Bytes that a record with `len` bytes of data takes; `len` is at most `u32::MAX`.
fn record_bytes(len: u64) -> u64 {
    HEAD_BYTES + len.next_multiple_of(ALIGN)
}

/// The word at `position + 8 * n`; `None` never happens, as the mask keeps it inside.
fn word(ring: &[AtomicU64], position: u64, n: u64) -> Option<&AtomicU64> {
    let at = (position.wrapping_add(8 * n) & (RING_BYTES - 1)) / 8;
    ring.get(usize::try_from(at).ok()?)
}

/// Where `len` bytes from `position` lie: at most two runs. `len` is at most the ring's size.
fn runs(ring: &[AtomicU64], position: u64, len: u64) -> [(*mut u8, usize); 2] {
    let base: *mut u8 = ring.as_ptr().cast_mut().cast();
    let at = position & (RING_BYTES - 1);
    let first = len.min(RING_BYTES - at);
    // Both fit: they are at most the ring's size.
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(0);
    [(base.wrapping_add(size(at)), size(first)), (base, size(len - first))]
}

#[derive(Debug)]
struct Job {
    work: WorkRequest,
    sent: u64,
    acked: u64,
    refused: bool,
}

impl Job {
    /// Data bytes of the record that starts at `offset`.
    fn record_at(&self, offset: u64) -> u64 {
        self.work.len.saturating_sub(offset).min(RECORD_BYTES)
    }
}

/// The sending side.
#[derive(Debug, Default)]
pub(super) struct Writer {
    head: u64,
    tail: u64,
    /// Oldest first. The first `sent` of them are in the ring entirely.
    jobs: VecDeque<Job>,
    sent: usize,
}

impl Writer {
    /// Opens the ring; once, before anything is put into it.
    pub(super) fn open(out: Half<'_>) {
        hazard::grant(out.bounce_grant(), OPEN);
    }

    /// Calls back what lies in the ring. Once [`Writer::is_quiet`], nothing of it is delivered any more.
    pub(super) fn close(out: Half<'_>) {
        hazard::withdraw(out.bounce_grant());
    }

    /// Whether the reader is not in the middle of a record.
    pub(super) fn is_quiet(out: Half<'_>) -> bool {
        hazard::quiet(out.bounce_active(), OPEN)
    }

    /// Whether another piece can be taken.
    pub(super) fn has_room(&self) -> bool {
        self.jobs.len() < JOBS_MAX
    }

    /// Whether any piece is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Takes a piece that has at least one byte. Its source must stay until it is reported.
    pub(super) fn start(&mut self, work: WorkRequest) {
        self.jobs.push_back(Job { work, sent: 0, acked: 0, refused: false });
    }

    /// Puts as much into the ring as has room; returns whether that was anything.
    pub(super) fn pump(&mut self, out: Half<'_>) -> bool {
        let before = self.head;
        while let Some(job) = self.jobs.get_mut(self.sent) {
            let len = job.record_at(job.sent);
            if self.head + record_bytes(len) > self.tail + RING_BYTES {
                break;
            }
            put(out.bounce(), self.head, job, len);
            self.head += record_bytes(len);
            job.sent += len;
            if job.sent >= job.work.len {
                self.sent += 1;
            }
            // Release: whoever sees the new head sees the record.
            out.bounce_head().store(self.head, Ordering::Release);
        }
        self.head != before
    }

    /// Whether the peer has taken something out of the ring since the last [`Writer::reap`].
    pub(super) fn has_news(&self, out: Half<'_>) -> bool {
        !self.jobs.is_empty() && out.bounce_tail().load(Ordering::Relaxed) != self.tail
    }

    /// Reports the pieces that the peer has finished with.
    pub(super) fn reap(
        &mut self,
        out: Half<'_>,
        mut report: impl FnMut(&WorkRequest, Result<(), WorkError>),
    ) -> Result<bool, Corrupt> {
        // Acquire: the status words come with the tail, and the ring's bytes are ours again.
        let tail = out.bounce_tail().load(Ordering::Acquire);
        if tail == self.tail {
            return Ok(false);
        }
        if tail < self.tail || tail > self.head {
            return Err(Corrupt);
        }
        while self.tail < tail {
            let job = self.jobs.front_mut().ok_or(Corrupt)?;
            let len = job.record_at(job.acked);
            let status = word(out.bounce(), self.tail, 4).ok_or(Corrupt)?;
            job.refused |= status.load(Ordering::Relaxed) != DELIVERED;
            job.acked += len;
            self.tail += record_bytes(len);
            if job.acked >= job.work.len {
                let end = if job.refused { Err(WorkError::RemoteAccess) } else { Ok(()) };
                report(&job.work, end);
                self.jobs.pop_front();
                self.sent = self.sent.saturating_sub(1);
            }
        }
        if self.tail == tail { Ok(true) } else { Err(Corrupt) }
    }

    /// Reports every piece as ended by `error`. The ring must be closed, and quiet or its reader dead or held up for too long.
    pub(super) fn flush(
        &mut self,
        error: WorkError,
        mut report: impl FnMut(&WorkRequest, Result<(), WorkError>),
    ) {
        for job in self.jobs.drain(..) {
            report(&job.work, Err(error));
        }
        self.sent = 0;
    }
}

/// Writes the record of `len` bytes that comes next in `job` to the ring at `head`, which has room.
fn put(ring: &[AtomicU64], head: u64, job: &Job, len: u64) {
    let work = &job.work;
    let mut flags = 0;
    if job.sent == 0 {
        flags |= FIRST;
    }
    if job.sent + len >= work.len {
        flags |= LAST;
        if work.imm.is_some() {
            flags |= WITH_IMM;
        }
    }
    let shape = len | flags << 32 | u64::from(work.remote_nic) << 40;
    let imm = work.imm.map_or(0, |imm| u64::from(imm.bits()));
    let dst = work.dst.wrapping_add(job.sent);
    for (n, value) in (0..).zip([work.dst_key, dst, shape, imm, 0]) {
        if let Some(word) = word(ring, head, n) {
            word.store(value, Ordering::Relaxed);
        }
    }
    let mut src = work.src.wrapping_add(job.sent) as *const u8;
    for (run, bytes) in runs(ring, head + HEAD_BYTES, len) {
        // SAFETY: the source stays readable until the piece is reported (`Provider::post`); the run
        // lies in the ring, whose reader is done with it, as there is room.
        unsafe { copy(src, run, bytes, size_of_val(ring)) };
        src = src.wrapping_add(bytes);
    }
}

/// The receiving side.
#[derive(Debug, Default)]
pub(super) struct Reader {
    tail: u64,
    /// Whether a record of the piece under way was refused.
    refused: bool,
}

/// One record, taken out of the ring.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// The immediate to deliver, and the NIC it came to.
    pub(super) imm: Option<(NicIndex, u32)>,
}

impl Reader {
    /// Whether there is something in the ring.
    pub(super) fn has_news(&self, inn: Half<'_>) -> bool {
        inn.bounce_head().load(Ordering::Relaxed) != self.tail
    }

    /// Takes the oldest record and puts its bytes into `memory`; `None` if there is none.
    ///
    /// `nics` is how many NICs this side has.
    pub(super) fn take(
        &mut self,
        inn: Half<'_>,
        memory: &ShmMemory,
        nics: u8,
    ) -> Result<Option<Taken>, Corrupt> {
        // Acquire: the record comes with the head.
        let head = inn.bounce_head().load(Ordering::Acquire);
        if head == self.tail {
            return Ok(None);
        }
        if !hazard::enter(inn.bounce_active(), inn.bounce_grant(), OPEN) {
            return Ok(None);
        }
        let taken = self.take_granted(head, inn, memory, nics);
        hazard::leave(inn.bounce_active());
        taken.map(Some)
    }

    fn take_granted(
        &mut self,
        head: u64,
        inn: Half<'_>,
        memory: &ShmMemory,
        nics: u8,
    ) -> Result<Taken, Corrupt> {
        let filled = head.checked_sub(self.tail).filter(|n| *n <= RING_BYTES).ok_or(Corrupt)?;
        let ring = inn.bounce();
        let mut field = [0; 4];
        for (n, value) in (0..).zip(&mut field) {
            *value = word(ring, self.tail, n).ok_or(Corrupt)?.load(Ordering::Relaxed);
        }
        let [key, dst, shape, imm] = field;
        let len = shape & u64::from(u32::MAX);
        let flags = shape >> 32 & 0xff;
        let nic = u8::try_from(shape >> 40).map_err(|_| Corrupt)?;
        if filled < record_bytes(len) || nic >= nics {
            return Err(Corrupt);
        }
        let delivered = memory.deliver(key, dst, runs(ring, self.tail + HEAD_BYTES, len));
        self.refused = !delivered || (self.refused && flags & FIRST == 0);
        let status = if delivered { DELIVERED } else { REFUSED };
        word(ring, self.tail, 4).ok_or(Corrupt)?.store(status, Ordering::Relaxed);
        self.tail += record_bytes(len);
        // Release: status first; and our reads of the record end before it is overwritten.
        inn.bounce_tail().store(self.tail, Ordering::Release);
        let last = flags & (LAST | WITH_IMM) == LAST | WITH_IMM;
        // What does not fit 32 bits is no immediate of ours.
        let imm = if last && !self.refused { u32::try_from(imm).ok() } else { None };
        Ok(Taken { imm: imm.map(|imm| (nic, imm)) })
    }
}
