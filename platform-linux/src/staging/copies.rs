//! Copies between GPUs' memory and the slots: one queue of each GPU for what goes out, one for what comes in.
//!
//! A copy's last act is to store its number to a word of pinned memory; whoever reads it there sees its bytes.
//!
//! # Invariants
//!
//! - Each copy that was taken is reported once, and not before it is over: from then on nothing reads its source or writes its
//!   target.
//! - While the closer gives something back to a driver, that is asked for nothing: it would not come back before its GPU is idle
//!   ([`crate::closer`]). What is to be copied waits here meanwhile, in its order.
//! - A queue whose driver refuses a copy takes none until it has nothing left to do; what is asked of it meanwhile is reported as
//!   failed with that one.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use immwire_core::group::WorkError;
use immwire_core::id::Time;
use immwire_cuda::geometry::{Method, Tuning};
use immwire_cuda::{Copier, Device, Error, PagedCopy, PinnedMemory, Release, Stream};

use crate::gpus::{CLOSED_WITHIN, Known, number};

/// How long copies may be under way without one ending before the GPU is asked whether it has failed.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// How long GPUs may take, at the end, for what they were given.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Out,
    In,
}

/// A range to be copied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
struct Queue<T> {
    copier: Copier,
    /// The number of the last copy that has ended: the GPU's to write.
    ended: PinnedMemory,
    issued: u64,
    /// The driver's answer to a copy that it would not take, or to whether the GPU works: the number of none that is left is
    /// ever stored.
    failed: Option<i32>,
    flights: VecDeque<(u64, T)>,
}

impl<T> Queue<T> {
    fn new(device: &Device, flights: usize) -> Result<Self, Error> {
        let stream = Stream::new(device)?;
        Ok(Self {
            copier: Copier::new(&stream, Tuning::default())?,
            ended: PinnedMemory::zeroed(device, size_of::<u64>())?,
            issued: 0,
            failed: None,
            flights: VecDeque::with_capacity(flights),
        })
    }

    /// # Safety
    ///
    /// As for [`Copies::submit`].
    unsafe fn submit(&mut self, range: Range, what: T, sms: NonZeroU32) {
        let number = self.issued + 1;
        self.issued = number;
        self.flights.push_back((number, what));
        if self.failed.is_some() {
            return;
        }
        let copy = PagedCopy::contiguous(range.from, range.to, range.bytes);
        let release = Release::Store { word: self.ended.address(), value: number };
        // SAFETY: our caller's promise of the ranges; the word is the queue's own, in pinned memory, and written by its copies
        // alone, one after the other.
        if let Err(why) = unsafe { self.copier.submit(&copy, release, Method::Auto, sms) } {
            tracing::error!(%why, "a GPU's driver does not take a copy");
            self.failed = Some(self::number(why));
        }
    }

    /// Reports what is over; returns how much. `asks`: the driver may be asked.
    fn poll(&mut self, asks: bool, report: &mut impl FnMut(T, Result<(), WorkError>)) -> usize {
        if self.flights.is_empty() {
            return 0;
        }
        // First: then all copies before the one that was refused have stored their numbers.
        let all_over =
            asks && self.failed.is_some() && !matches!(self.copier.stream().is_done(), Ok(false));
        // Acquire: with the number come the bytes of all copies up to it.
        let ended = self.ended.word(0).map_or(0, |word| word.load(Ordering::Acquire));
        let mut over = 0;
        while self.flights.front().is_some_and(|(number, _)| *number <= ended) {
            let Some((_, what)) = self.flights.pop_front() else { break };
            over += 1;
            report(what, Ok(()));
        }
        if let Some(code) = self.failed.filter(|_| all_over) {
            over += self.flights.len();
            self.flights.drain(..).for_each(|(_, what)| report(what, Err(WorkError::Device(code))));
            self.failed = None;
        }
        over
    }
}

/// The queues of all GPUs of an engine.
#[derive(Debug)]
pub(super) struct Copies<T> {
    known: Arc<Known>,
    /// By GPU: out, in.
    queues: Vec<[Queue<T>; 2]>,
    /// To be enqueued when the driver can be asked again.
    waiting: VecDeque<(usize, Way, Range, T)>,
    sms: NonZeroU32,
    flying: usize,
    /// When something ended last, or nothing was under way.
    progress: Time,
}

impl<T> Copies<T> {
    /// For so many copies at a time, without taking more memory.
    pub(super) fn new(
        known: &Arc<Known>,
        sms: NonZeroU32,
        most: (usize, usize),
    ) -> Result<Self, Error> {
        let queues = known
            .devices
            .iter()
            .map(|one| Ok([Queue::new(&one.device, most.0)?, Queue::new(&one.device, most.1)?]));
        let queues: Vec<_> = queues.collect::<Result<_, Error>>()?;
        let waiting = VecDeque::with_capacity(most.0 + most.1);
        let known = Arc::clone(known);
        Ok(Self { known, queues, waiting, sms, flying: 0, progress: Time::ZERO })
    }

    fn queue(&mut self, gpu: usize, way: Way) -> Option<&mut Queue<T>> {
        let [out, inn] = self.queues.get_mut(gpu)?;
        Some(if way == Way::Out { out } else { inn })
    }

    /// Whether a copy would be enqueued, if one is asked for.
    pub(super) fn takes(&mut self, gpu: usize, way: Way) -> bool {
        self.queue(gpu, way).is_some_and(|queue| queue.failed.is_none())
    }

    /// Has a GPU copy a range; `false`: there is no such GPU.
    ///
    /// # Safety
    ///
    /// Until it is reported, both ranges are allocated and reached by that GPU, nobody uses the target, and nobody writes the
    /// source.
    pub(super) unsafe fn submit(&mut self, gpu: usize, way: Way, range: Range, what: T) -> bool {
        if self.queue(gpu, way).is_none() {
            return false;
        }
        self.flying += 1;
        self.waiting.push_back((gpu, way, range, what));
        self.enqueue();
        true
    }

    /// Enqueues what is to be copied, unless the driver is busy giving something back.
    fn enqueue(&mut self) {
        let sms = self.sms;
        while !self.known.closer.is_busy()
            && let Some((gpu, way, range, what)) = self.waiting.pop_front()
        {
            // There is one: it was asked for before.
            let Some(queue) = self.queue(gpu, way) else { continue };
            // SAFETY: as who submitted it has promised, until it is reported.
            unsafe { queue.submit(range, what, sms) };
        }
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.flying == 0
    }

    /// Reports the copies that are over; returns whether there were any. Idle, it costs a load.
    pub(super) fn poll(
        &mut self,
        now: Time,
        report: &mut impl FnMut(T, Result<(), WorkError>),
    ) -> bool {
        if self.flying == 0 {
            self.progress = now;
            return false;
        }
        self.enqueue();
        let asks = !self.known.closer.is_busy();
        let queues = self.queues.iter_mut().flatten();
        let over = queues.map(|queue| queue.poll(asks, report)).sum::<usize>();
        self.flying -= over.min(self.flying);
        if over > 0 {
            self.progress = now;
        } else if asks && now >= self.progress.after(LOOK_AFTER) {
            self.progress = now;
            for queue in self.queues.iter_mut().flatten().filter(|queue| !queue.flights.is_empty())
            {
                if let Err(why) = queue.copier.stream().is_done() {
                    tracing::error!(%why, "a GPU has failed");
                    queue.failed = Some(number(why));
                }
            }
        }
        over > 0
    }

    /// Waits until nothing is copied any more, and nothing is enqueued after. `false`: a GPU is stuck, and all that it may still use is kept
    /// for good, or until its driver has given back what it was asked to before.
    pub(super) fn settle(&mut self) -> bool {
        if !self.known.closer.end(CLOSED_WITHIN) || !self.known.is_free_within(CLOSED_WITHIN) {
            return false;
        }
        let start = Instant::now();
        let mut is_over = true;
        for queue in self.queues.iter_mut().flatten().filter(|queue| !queue.flights.is_empty()) {
            is_over &= queue.copier.settle(STUCK_AFTER.saturating_sub(start.elapsed()));
        }
        is_over
    }

    /// All that is left, when nothing is copied any more.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.flying = 0;
        let flights = self.queues.iter_mut().flatten().flat_map(|queue| queue.flights.drain(..));
        flights.map(|it| it.1).chain(self.waiting.drain(..).map(|it| it.3))
    }
}
