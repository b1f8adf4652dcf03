//! What there is in this process: contexts, streams, events, modules and memory, by their handles.
//!
//! # Invariants
//!
//! 1. A handle is given out once: one that is not in its table was destroyed, or never was.
//! 2. The lock is taken first, and others (a stream's, an event's) while it is held; never the other way round. Nobody
//!    waits for work while holding it.

use crate::code::{self, Answer};
use crate::memory::{Backing, Reserved, Table};
use crate::stream::{Event, Stream};
use crate::violation::broken;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

/// Handles are no addresses: whoever uses one as such faults.
const FIRST_HANDLE: u64 = 0xface_0000_0000_0000;
/// `CU_STREAM_PER_THREAD`, the last of the handles that stand for a default stream.
const LAST_DEFAULT_STREAM: u64 = 2;

/// A GPU's primary context.
#[derive(Debug)]
pub(crate) struct Context {
    /// The GPU's number on the machine.
    pub(crate) gpu: u8,
    pub(crate) retained: u32,
    /// `CU_CTX_*`.
    pub(crate) flags: u32,
    default_stream: Option<Arc<Stream>>,
}

/// A context that is current.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Current {
    pub(crate) context: u64,
    pub(crate) gpu: u8,
}

/// Loaded kernels. Work that runs one holds the `Arc`.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) context: u64,
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) kernel: crate::kernel::Kernel,
    /// Bytes of dynamic shared memory that it may be launched with.
    pub(crate) most_shared_bytes: u32,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) memory: Table,
    pub(crate) contexts: BTreeMap<u64, Context>,
    pub(crate) streams: BTreeMap<u64, Arc<Stream>>,
    pub(crate) events: BTreeMap<u64, Arc<Event>>,
    pub(crate) modules: BTreeMap<u64, Arc<Module>>,
    pub(crate) functions: BTreeMap<u64, Function>,
    /// Of streams, by their handles.
    pub(crate) captures: BTreeMap<u64, Capture>,
    /// Nodes of what was captured.
    pub(crate) graphs: BTreeMap<u64, usize>,
    /// Addresses of `cuMemAddressReserve`.
    pub(crate) reserved: BTreeMap<u64, Reserved>,
    /// Handles of `cuMemCreate`, by value; how many there are of each.
    pub(crate) created: BTreeMap<u64, (Arc<Backing>, u32)>,
    /// Of these, what is being unmapped, and on which thread.
    pub(crate) unmapping: BTreeMap<u64, ThreadId>,
    /// How often each was opened by `cuIpcOpenMemHandle`, by its address.
    pub(crate) opened: BTreeMap<u64, u32>,
    handles: u64,
    streams_made: u64,
    /// Closed streams, which do what they were given.
    ended: Vec<(Arc<Stream>, JoinHandle<()>)>,
    /// How many commands it is to the one that is refused; 0: none is.
    pub(crate) refused_in: u32,
}

static WORLD: Mutex<World> = Mutex::new(World {
    memory: Table::new(),
    contexts: BTreeMap::new(),
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
    modules: BTreeMap::new(),
    functions: BTreeMap::new(),
    captures: BTreeMap::new(),
    graphs: BTreeMap::new(),
    reserved: BTreeMap::new(),
    created: BTreeMap::new(),
    unmapping: BTreeMap::new(),
    opened: BTreeMap::new(),
    handles: 0,
    streams_made: 0,
    ended: Vec::new(),
    refused_in: 0,
});

/// Whether `cuInit` has succeeded.
static INITIALIZED: AtomicBool = AtomicBool::new(false);
/// Whether it had in the process that this one was forked by: streams' threads are not here, and locks as they were.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Says that `cuInit` has succeeded.
pub(crate) fn initialize() {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    if !INITIALIZED.swap(true, Ordering::AcqRel) {
        // SAFETY: pthread_atfork(3): the handler stores a word, and is there as long as the process: nobody unloads a driver.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

/// Whether all calls are refused, as by the driver in a process that was forked after `cuInit`.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

thread_local! {
    /// Contexts of this thread; the last is current. Never dropped: the program's own destructors may come later.
    static STACK: ManuallyDrop<RefCell<Vec<u64>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    /// How this thread's calls mind captures.
    pub(crate) static CAPTURE_MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    /// Whether this is a stream's thread: only host functions could call the driver there.
    pub(crate) static OF_A_STREAM: Cell<bool> = const { Cell::new(false) };
}

/// Uses this thread's stack of contexts.
pub(crate) fn stack<T>(f: impl FnOnce(&mut Vec<u64>) -> T) -> T {
    STACK.with(|stack| f(&mut stack.borrow_mut()))
}

/// Locks. No thread panics with the lock: what is wrong aborts.
pub(crate) fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Contexts of calls that wait for their GPUs, which all others of the same GPU but [`LET_THROUGH`] have to wait for meanwhile, as NVIDIA's driver
/// 580.159.04 has it on an H100 and on H200s.
static CLOSING: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn closing() -> MutexGuard<'static, Vec<u64>> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While this is there, others that use the context's GPU wait.
pub(crate) struct Closing(u64);

impl Closing {
    pub(crate) fn begin(context: u64) -> Self {
        closing().push(context);
        Self(context)
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        let mut all = closing();
        let ours = all.iter().position(|&context| context == self.0);
        ours.map(|at| all.swap_remove(at));
    }
}

/// Calls that were seen to come back at once while another waits so.
const LET_THROUGH: [&str; 8] = [
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuEventQuery",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamWriteValue64",
    "cuThreadExchangeStreamCaptureMode",
];

/// Begins a call of the driver's.
pub(crate) fn begin(call: &str) -> MutexGuard<'static, World> {
    if OF_A_STREAM.get() {
        broken!(CallInHostFunction, "{call}");
    }
    if !INITIALIZED.load(Ordering::Acquire) {
        broken!(NotInitialized, "{call}");
    }
    let current = stack(|stack| stack.last().copied());
    if let Some(context) = current.filter(|_| !LET_THROUGH.contains(&call)) {
        while closing().contains(&context) {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    let world = world();
    if UNSAFE.contains(&call) {
        world.must_not_capture(call);
    }
    world
}

/// Calls that CUDA takes for unsafe while streams are captured. The documentation names some of them; one H100's driver refused the
/// queries; the others wait for the GPU, or may.
const UNSAFE: [&str; 17] = [
    "cuCtxEnablePeerAccess",
    "cuEventQuery",
    "cuIpcCloseMemHandle",
    "cuIpcOpenMemHandle",
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemUnmap",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

/// A stream of which what is enqueued becomes a graph.
#[derive(Debug)]
pub(crate) struct Capture {
    /// `CUstreamCaptureMode`.
    pub(crate) mode: u32,
    pub(crate) thread: ThreadId,
}

pub(crate) const GLOBAL: u32 = 0;
pub(crate) const THREAD_LOCAL: u32 = 1;
pub(crate) const RELAXED: u32 = 2;

impl World {
    /// Ends the process if a capture would fail by a call of this thread's (`cuThreadExchangeStreamCaptureMode`).
    fn must_not_capture(&self, call: &str) {
        let (mode, this) = (CAPTURE_MODE.get(), std::thread::current().id());
        let minds = |capture: &Capture| match mode {
            RELAXED => false,
            _ if capture.thread == this => capture.mode != RELAXED,
            THREAD_LOCAL => false,
            _ => capture.mode == GLOBAL,
        };
        if self.captures.values().any(minds) {
            broken!(Captured, "{call}");
        }
    }

    /// A new handle.
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 1;
        FIRST_HANDLE + self.handles * 16
    }

    /// This thread's current context; that there is none is a violation.
    pub(crate) fn current(&self, call: &str) -> Current {
        let Some(context) = stack(|stack| stack.last().copied()) else {
            broken!(NoContext, "{call}");
        };
        Current { context, gpu: self.context(call, context).gpu }
    }

    pub(crate) fn context(&self, call: &str, handle: u64) -> &Context {
        match self.contexts.get(&handle) {
            Some(context) => context,
            None => broken!(Handle, "{call}: context {handle:#x}"),
        }
    }

    pub(crate) fn retain(&mut self, gpu: u8) -> u64 {
        let there = self.contexts.iter_mut().find(|(_, context)| context.gpu == gpu);
        if let Some((&handle, context)) = there {
            context.retained += 1;
            return handle;
        }
        let handle = self.handle();
        self.contexts.insert(handle, Context { gpu, retained: 1, flags: 0, default_stream: None });
        handle
    }

    /// Takes off one retention; the last destroys the context, and what goes with it.
    pub(crate) fn release(&mut self, gpu: u8) {
        let there = self.contexts.iter_mut().find(|(_, context)| context.gpu == gpu);
        let Some((&handle, context)) = there else {
            broken!(Handle, "cuDevicePrimaryCtxRelease: GPU {gpu} has no context");
        };
        context.retained -= 1;
        if context.retained > 0 {
            return;
        }
        let default_stream = context.default_stream.take();
        self.contexts.remove(&handle);
        self.memory.retire(handle);
        let opened = std::mem::take(&mut self.opened);
        self.opened = opened.into_iter().filter(|o| self.memory.at(o.0).is_some()).collect();
        self.memory.peers.retain(|&(from, to)| from != gpu && to != gpu);
        self.events.retain(|_, event| event.context != handle);
        let modules: Vec<u64> =
            self.modules.iter().filter(|m| m.1.context == handle).map(|m| *m.0).collect();
        modules.into_iter().for_each(|module| self.unload("cuDevicePrimaryCtxRelease", module));
        let all = std::mem::take(&mut self.streams).into_iter();
        let (theirs, kept) = all.partition(|(_, stream)| stream.context == handle);
        self.streams = kept;
        let theirs: BTreeMap<u64, Arc<Stream>> = theirs;
        theirs.into_values().chain(default_stream).for_each(|stream| self.close(&stream));
    }

    /// The stream of this handle, which need not be of a current context.
    pub(crate) fn any_stream(&mut self, call: &str, handle: u64) -> Arc<Stream> {
        if handle <= LAST_DEFAULT_STREAM {
            return self.default_stream(self.current(call));
        }
        match self.streams.get(&handle) {
            Some(stream) => Arc::clone(stream),
            None => broken!(Handle, "{call}: stream {handle:#x}"),
        }
    }

    /// The stream of this handle, of the current context.
    pub(crate) fn stream(&mut self, call: &str, handle: u64) -> Arc<Stream> {
        let current = self.current(call);
        let stream = self.any_stream(call, handle);
        if stream.context != current.context {
            broken!(WrongContext, "{call}: a stream of GPU {}'s", stream.gpu);
        }
        stream
    }

    /// All streams of a context that have been used, destroyed ones too.
    pub(crate) fn streams_of(&self, context: u64) -> Vec<Arc<Stream>> {
        let default = self.contexts.get(&context).and_then(|it| it.default_stream.clone());
        let made = self.streams.values().filter(|stream| stream.context == context).cloned();
        let ended = self.ended.iter().map(|(stream, _)| stream);
        let ended = ended.filter(|stream| stream.context == context).cloned();
        made.chain(default).chain(ended).collect()
    }

    /// Takes one more command, unless it is the one to be refused.
    pub(crate) fn take_command(&mut self) -> Answer {
        let is_it = self.refused_in == 1;
        self.refused_in = self.refused_in.saturating_sub(1);
        if is_it { Err(code::OUT_OF_MEMORY) } else { Ok(()) }
    }

    fn default_stream(&mut self, current: Current) -> Arc<Stream> {
        let there = self.contexts.get(&current.context).and_then(|c| c.default_stream.clone());
        if let Some(stream) = there {
            return stream;
        }
        let stream = self.start(current);
        if let Some(context) = self.contexts.get_mut(&current.context) {
            context.default_stream = Some(Arc::clone(&stream));
        }
        stream
    }

    /// A new stream, with a thread of its own.
    pub(crate) fn start(&mut self, current: Current) -> Arc<Stream> {
        self.join_ended();
        self.streams_made += 1;
        Stream::start(current, self.streams_made)
    }

    /// Lets a stream's thread end after the work that it has.
    pub(crate) fn close(&mut self, stream: &Arc<Stream>) {
        self.join_ended();
        self.ended.extend(stream.close().map(|thread| (Arc::clone(stream), thread)));
    }

    fn join_ended(&mut self) {
        for (_, thread) in self.ended.extract_if(.., |(_, thread)| thread.is_finished()) {
            let _ = thread.join();
        }
    }

    pub(crate) fn event(&self, call: &str, handle: u64) -> Arc<Event> {
        match self.events.get(&handle) {
            Some(event) => Arc::clone(event),
            None => broken!(Handle, "{call}: event {handle:#x}"),
        }
    }

    pub(crate) fn module(&self, call: &str, handle: u64) -> &Arc<Module> {
        match self.modules.get(&handle) {
            Some(module) => module,
            None => broken!(Handle, "{call}: module {handle:#x}"),
        }
    }

    pub(crate) fn unload(&mut self, call: &str, handle: u64) {
        if Arc::strong_count(self.module(call, handle)) > 1 {
            broken!(ModuleInUse, "{call}");
        }
        self.modules.remove(&handle);
        self.functions.retain(|_, function| function.module != handle);
    }

    pub(crate) fn function(&mut self, call: &str, handle: u64) -> &mut Function {
        match self.functions.get_mut(&handle) {
            Some(function) => function,
            None => broken!(Handle, "{call}: function {handle:#x}"),
        }
    }
}
