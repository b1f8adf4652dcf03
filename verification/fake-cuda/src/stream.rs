//! Streams and events: work in order, each stream's on a thread of its own.
//!
//! Default streams are streams like others: no stream waits for them, nor they for any, which is less order than the
//! driver's promise for streams made without `CU_STREAM_NON_BLOCKING`.
//!
//! # Invariants
//!
//! 1. A stream's n-th piece of work is done once `done >= n`, and then holds no memory.
//! 2. A closed stream's thread ends after its work.

use crate::kernel::Launch;
use crate::random::Random;
use crate::reach::{Host, Reach};
use crate::world::{Current, OF_A_STREAM};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Between two looks at a word that is waited for.
const LOOK: Duration = Duration::from_micros(20);
/// Copies are cut into as many pieces, unless these were shorter than [`SHORTEST_PIECE`].
const PIECES: u64 = 16;
const SHORTEST_PIECE: u64 = 4096;

/// Kernels, copies and fills of this process do not begin, and warps that stand by look at nothing: their GPUs are stuck.
static HELD: AtomicBool = AtomicBool::new(false);

/// Streams that would begin one now.
static HELD_UP: AtomicU64 = AtomicU64::new(0);

/// Holds kernels, copies and fills that have not begun, and warps that stand by, or lets them go on.
pub(crate) fn hold(held: bool) {
    HELD.store(held, Ordering::Release);
}

/// Returns when kernels may go on.
pub(crate) fn wait_while_held() {
    if !HELD.load(Ordering::Acquire) {
        return;
    }
    HELD_UP.fetch_add(1, Ordering::AcqRel);
    while HELD.load(Ordering::Acquire) {
        std::thread::sleep(LOOK);
    }
    HELD_UP.fetch_sub(1, Ordering::AcqRel);
}

/// How many streams are held up.
pub(crate) fn held_up() -> u64 {
    HELD_UP.load(Ordering::Acquire)
}

/// When a wait for a word is over. `CUstreamWaitValue_flags`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Until {
    /// The cyclic difference is not negative.
    GreaterOrEqual,
    Equal,
    And,
    Nor,
}

impl Until {
    fn holds(self, word: u64, value: u64) -> bool {
        match self {
            Self::GreaterOrEqual => word.wrapping_sub(value).cast_signed() >= 0,
            Self::Equal => word == value,
            Self::And => word & value != 0,
            Self::Nor => !(word | value) != 0,
        }
    }
}

/// Something to be done.
#[derive(Debug)]
pub(crate) enum Work {
    Copy {
        reach: Reach,
        to: u64,
        from: u64,
        bytes: u64,
    },
    /// A copy with host memory on one side that is neither pinned nor registered.
    CopyPlain {
        reach: Reach,
        host: Host,
        plain: u64,
        known: u64,
        bytes: u64,
    },
    Fill {
        reach: Reach,
        at: u64,
        byte: u8,
        bytes: u64,
    },
    Launch {
        reach: Reach,
        launch: Launch,
    },
    /// Waits for a word.
    Await {
        reach: Reach,
        word: u64,
        value: u64,
        until: Until,
    },
    /// Writes a word.
    Write {
        reach: Reach,
        word: u64,
        value: u64,
    },
    /// Waits until another stream has done so much.
    After {
        stream: Arc<Stream>,
        ticket: u64,
    },
    /// Takes an event's time.
    Mark(Arc<Event>),
    /// Calls a function of the program's, with an address of the program's.
    Call {
        function: unsafe extern "C" fn(*mut c_void),
        data: usize,
    },
}

impl Work {
    fn moves(&self) -> bool {
        matches!(
            self,
            Self::Copy { .. } | Self::CopyPlain { .. } | Self::Fill { .. } | Self::Launch { .. }
        )
    }
}

#[derive(Debug, Default)]
struct Queue {
    work: VecDeque<Work>,
    enqueued: u64,
    done: u64,
    closed: bool,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) gpu: u8,
    /// What is enqueued becomes a graph: so many nodes until now. `None`: it is done.
    captured: Mutex<Option<usize>>,
    queue: Mutex<Queue>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// Starts the process's `number`-th stream.
    pub(crate) fn start(current: Current, number: u64) -> Arc<Self> {
        let stream = Arc::new(Self {
            context: current.context,
            gpu: current.gpu,
            captured: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
        });
        let served = Arc::clone(&stream);
        let thread = Builder::new().name(format!("fake-cuda {number}")).spawn(move || {
            OF_A_STREAM.set(true);
            served.serve(&mut Random::new(number));
        });
        match thread {
            Ok(thread) => *lock(&stream.thread) = Some(thread),
            Err(why) => crate::violation::broken!(NotModelled, "no thread for a stream: {why}"),
        }
        stream
    }

    fn serve(&self, random: &mut Random) {
        while let Some(work) = self.next() {
            random.delay();
            if work.moves() {
                wait_while_held();
            }
            run(work, random);
            lock(&self.queue).done += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Work> {
        let open = |queue: &mut Queue| queue.work.is_empty() && !queue.closed;
        let waited = self.changed.wait_while(lock(&self.queue), open);
        waited.unwrap_or_else(PoisonError::into_inner).work.pop_front()
    }

    pub(crate) fn is_captured(&self) -> bool {
        lock(&self.captured).is_some()
    }

    pub(crate) fn begin_capture(&self) {
        *lock(&self.captured) = Some(0);
    }

    /// Returns how many nodes there are.
    pub(crate) fn end_capture(&self) -> usize {
        lock(&self.captured).take().unwrap_or(0)
    }

    /// Enqueues; returns how much will have been done with it.
    pub(crate) fn push(&self, work: Work) -> u64 {
        if let Some(nodes) = lock(&self.captured).as_mut() {
            // Events are edges of a graph, and no nodes.
            *nodes += usize::from(!matches!(work, Work::Mark(_) | Work::After { .. }));
            return self.enqueued();
        }
        let mut queue = lock(&self.queue);
        queue.work.push_back(work);
        queue.enqueued += 1;
        self.changed.notify_all();
        queue.enqueued
    }

    /// How much has been enqueued so far.
    pub(crate) fn enqueued(&self) -> u64 {
        lock(&self.queue).enqueued
    }

    pub(crate) fn has_done(&self, ticket: u64) -> bool {
        lock(&self.queue).done >= ticket
    }

    pub(crate) fn wait(&self, ticket: u64) {
        let waited = self.changed.wait_while(lock(&self.queue), |queue| queue.done < ticket);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Lets the thread end after the work that there is; returns it, the first time.
    pub(crate) fn close(&self) -> Option<JoinHandle<()>> {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
        lock(&self.thread).take()
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: u64,
    pub(crate) timed: bool,
    /// It was recorded last in a stream that was captured then.
    pub(crate) captured: AtomicBool,
    mark: Mutex<Option<Mark>>,
}

/// An event's last recording.
#[derive(Debug)]
struct Mark {
    stream: Arc<Stream>,
    ticket: u64,
    when: Option<Instant>,
}

impl Event {
    pub(crate) fn new(context: u64, timed: bool) -> Arc<Self> {
        let (captured, mark) = (AtomicBool::new(false), Mutex::default());
        Arc::new(Self { context, timed, captured, mark })
    }

    pub(crate) fn record(self: &Arc<Self>, stream: &Arc<Stream>) {
        self.captured.store(stream.is_captured(), Ordering::Relaxed);
        // Held meanwhile, so that the stream's thread finds the new mark.
        let mut mark = lock(&self.mark);
        let ticket = stream.push(Work::Mark(Arc::clone(self)));
        *mark = Some(Mark { stream: Arc::clone(stream), ticket, when: None });
    }

    /// What was recorded last, if anything was.
    pub(crate) fn recorded(&self) -> Option<(Arc<Stream>, u64)> {
        lock(&self.mark).as_ref().map(|mark| (Arc::clone(&mark.stream), mark.ticket))
    }

    /// When what was recorded last was done.
    pub(crate) fn when(&self) -> Option<Instant> {
        lock(&self.mark).as_ref().and_then(|mark| mark.when)
    }
}

/// Does it. The memory is given up by the end.
fn run(work: Work, random: &mut Random) {
    match work {
        Work::Copy { mut reach, to, from, bytes } => pieces(random, bytes, |at, bytes| {
            reach.copy(to + at, from + at, bytes);
        }),
        Work::CopyPlain { mut reach, host, plain, known, bytes } => {
            reach.copy_plain(host, plain, known, bytes);
        }
        Work::Fill { mut reach, at: to, byte, bytes } => pieces(random, bytes, |at, bytes| {
            reach.fill(to + at, byte, bytes);
        }),
        Work::Launch { mut reach, launch } => launch.run(&mut reach, random),
        Work::Await { mut reach, word, value, until } => {
            while !until.holds(reach.word(word, false, "word").load(Ordering::Acquire), value) {
                std::thread::sleep(LOOK);
            }
        }
        Work::Write { mut reach, word, value } => {
            reach.announce(word, |word| word.store(value, Ordering::Release));
        }
        Work::After { stream, ticket } => stream.wait(ticket),
        Work::Mark(event) => {
            // Recorded again meanwhile, it gets the time of that in the end.
            if let Some(mark) = lock(&event.mark).as_mut() {
                mark.when = Some(Instant::now());
            }
        }
        Work::Call { function, data } => {
            // SAFETY: the program's own function, called once, with what the program gave for it.
            unsafe { function(data as *mut c_void) };
        }
    }
}

/// Calls `f` with the offset and length of each piece of `bytes` bytes.
pub(crate) fn pieces(random: &mut Random, bytes: u64, mut f: impl FnMut(u64, u64)) {
    let piece = bytes.div_ceil(PIECES).max(SHORTEST_PIECE);
    random.each(bytes.div_ceil(piece), |i| f(i * piece, piece.min(bytes - i * piece)));
}
