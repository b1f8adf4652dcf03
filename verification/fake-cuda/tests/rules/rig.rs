//! What the tests stand on: a process of its own for each, that finds the library as a driver, and calls without ceremony.

use std::ffi::c_void;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self as cu, CUresult};
use immwire_cuda::args::{self, CopyArgs, PagesArgs, ReleaseArgs, TurnsArgs};

/// How long anything may take here.
pub const PATIENCE: Duration = Duration::from_secs(20);
const SIGABRT: i32 = 6;
const SIGSEGV: i32 = 11;

/// How a test is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All is well, and the log is empty.
    Kept,
    /// Aborted, and the log names this rule.
    Broken(&'static str),
    /// The CPU faults.
    Faults,
}

/// Calls the driver; the answer.
#[macro_export]
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the library checks what it is given; where it writes, and what it reads, is this test's own.
        unsafe { cu::$name($($argument),*) }
    };
}

/// Calls the driver, which must succeed.
#[macro_export]
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::call!($name($($argument),*)), CUresult::CUDA_SUCCESS, stringify!($name))
    };
}

/// Calls the driver, which must succeed; what it wrote to its first argument, which is left out.
#[macro_export]
macro_rules! got {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: numbers and addresses, of which zero is one.
        let mut value = unsafe { std::mem::zeroed() };
        $crate::ok!($name(&raw mut value, $($argument),*));
        value
    }};
}

/// Runs `body` in a process of its own, which must end so.
pub fn run(name: &str, end: End, environment: &[(&str, &str)], body: fn()) {
    if std::env::var("FAKE_CUDA_TEST").is_ok_and(|test| test == name) {
        println!("ran {name}");
        return body();
    }
    let folder = tempfile::tempdir().unwrap();
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let built = [deps.join("libfake_cuda.so"), deps.parent().unwrap().join("libfake_cuda.so")];
    let built = built.iter().find(|file| file.exists()).expect("cargo builds it before its tests");
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(built, folder.path().join(name)).unwrap();
    }
    let log = folder.path().join("log");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env("FAKE_CUDA_TEST", name)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("IMMWIRE_FAKE_CUDA_LOG", &log)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let (status, mut said) = (output.status, String::from_utf8_lossy(&output.stdout).into_owned());
    said += &String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("ran {name}")), "there is no test of this name");
    let logged = std::fs::read_to_string(log).unwrap_or_default();
    match end {
        End::Kept => assert!(status.success() && logged.is_empty(), "{status}: {said}"),
        End::Faults => assert_eq!((status.signal(), &*logged), (Some(SIGSEGV), ""), "{said}"),
        End::Broken(rule) => {
            assert_eq!(status.signal(), Some(SIGABRT), "{said}");
            assert!(logged.contains(&format!(": {rule}: ")), "{logged}");
            assert_eq!(logged.lines().count(), 1, "{logged}");
        }
    }
}

/// Another process, in a role.
pub struct Peer {
    child: Child,
    lines: BufReader<ChildStdout>,
}

/// Starts the same test as another process: there [`role`] says so.
pub fn peer(environment: &[(&str, &str)]) -> Peer {
    let name = std::env::var("FAKE_CUDA_TEST").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture", "--test-threads", "1"])
        .env("FAKE_CUDA_ROLE", "peer")
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    Peer { child, lines }
}

/// Whether this process is a [`peer`].
pub fn is_peer() -> bool {
    std::env::var_os("FAKE_CUDA_ROLE").is_some()
}

impl Peer {
    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "the peer has ended");
            // The harness writes in front of a test's own text.
            if let Some((_, said)) = line.trim_end().split_once("says ") {
                return said.to_owned();
            }
        }
    }

    pub fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

/// Says a line to the process that started this one.
pub fn say(line: &str) {
    println!("says {line}");
}

/// What the process that started this one says next.
pub fn hear() -> String {
    let mut line = String::new();
    assert_ne!(std::io::stdin().read_line(&mut line).unwrap(), 0, "nobody speaks any more");
    line.trim_end().to_owned()
}

/// Stays until the process that started this one has ended, and ends.
pub fn stay() -> ! {
    while std::io::stdin().read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0) {}
    std::process::exit(0)
}

pub fn hex(bytes: &[i8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> cu::CUipcMemHandle {
    let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
    for (i, byte) in handle.reserved.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap().cast_signed();
    }
    handle
}

/// A GPU with its context current, a stream and the kernels.
#[derive(Debug, Clone, Copy)]
pub struct Gpu {
    pub context: cu::CUcontext,
    pub stream: cu::CUstream,
    pub module: cu::CUmodule,
}

impl Gpu {
    pub fn open(ordinal: i32) -> Self {
        ok!(cuInit(0));
        let device = got!(cuDeviceGet(ordinal));
        let context = got!(cuDevicePrimaryCtxRetain(device));
        ok!(cuCtxPushCurrent_v2(context));
        let stream = got!(cuStreamCreate(1));
        let module = got!(cuModuleLoadData(c"anything".as_ptr().cast()));
        Self { context, stream, module }
    }

    /// Waits for all that is enqueued.
    pub fn settle(&self) {
        ok!(cuStreamSynchronize(self.stream));
    }

    /// Holds the stream back until the word becomes 1.
    pub fn hold(&self) -> &'static AtomicU64 {
        let word = pinned(8);
        word.word(0).store(0, Ordering::Relaxed);
        ok!(cuStreamWaitValue64_v2(self.stream, word.0, 1, 0));
        word.word(0)
    }

    pub fn function(&self, kernel: Kernel) -> cu::CUfunction {
        let name = match kernel {
            Kernel::Any => c"immwire_copy_any",
            Kernel::Vector => c"immwire_copy_vector",
            Kernel::Bulk => c"immwire_copy_bulk",
        };
        let function = got!(cuModuleGetFunction(self.module, name.as_ptr()));
        if kernel == Kernel::Bulk {
            let most = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            ok!(cuFuncSetAttribute(function, most, 200 << 10));
        }
        function
    }

    pub fn launch(&self, launch: &Launch) {
        let function = self.function(launch.kernel);
        self.launch_as(launch, function, [4, 1, 1], [launch.threads, 1, 1]);
    }

    pub fn launch_as(
        &self,
        launch: &Launch,
        function: cu::CUfunction,
        grid: [u32; 3],
        block: [u32; 3],
    ) {
        let mut args = launch.args;
        let mut parameters = [(&raw mut args).cast::<c_void>()];
        ok!(cuLaunchKernel(
            function,
            grid[0],
            grid[1],
            grid[2],
            block[0],
            block[1],
            block[2],
            launch.shared_bytes,
            self.stream,
            parameters.as_mut_ptr(),
            null_mut(),
        ));
    }

    /// Copies, and waits.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) {
        ok!(cuMemcpyAsync(to, from, bytes, self.stream));
        self.settle();
    }

    /// The GPU's bytes.
    pub fn read(&self, from: u64, bytes: usize) -> Vec<u8> {
        let host = pinned(bytes);
        self.copy(host.0, from, bytes);
        let read = host.bytes(bytes).to_vec();
        ok!(cuMemFreeHost(host.0 as *mut c_void));
        read
    }

    /// Zeroed memory.
    pub fn alloc(&self, bytes: usize) -> u64 {
        let address = got!(cuMemAlloc_v2(bytes));
        ok!(cuMemsetD8Async(address, 0, bytes, self.stream));
        self.settle();
        address
    }
}

/// Pinned memory, as long as the process.
#[derive(Debug, Clone, Copy)]
pub struct Pinned(pub u64);

pub fn pinned(bytes: usize) -> Pinned {
    let address: *mut c_void = got!(cuMemHostAlloc(bytes, 1));
    Pinned(address as u64)
}

impl Pinned {
    pub fn word(self, index: u64) -> &'static AtomicU64 {
        // SAFETY: aligned, within what was allocated, and not freed while it is used.
        unsafe { AtomicU64::from_ptr((self.0 + 8 * index) as *mut u64) }
    }

    pub fn bytes(self, bytes: usize) -> &'static mut [u8] {
        // SAFETY: within what was allocated; used by one at a time.
        unsafe { std::slice::from_raw_parts_mut(self.0 as *mut u8, bytes) }
    }
}

pub fn await_word(word: &AtomicU64, value: u64) {
    let started = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(started.elapsed() < PATIENCE, "the word never came");
        std::thread::yield_now();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    Any,
    Vector,
    Bulk,
}

#[derive(Debug, Clone, Copy)]
pub struct Launch {
    pub kernel: Kernel,
    pub threads: u32,
    pub shared_bytes: u32,
    pub args: CopyArgs,
}

pub const PAGE: u64 = 4096;

/// Pages one after the other, in pieces of a quarter.
pub fn pages(kernel: Kernel, from: u64, to: u64, count: u32) -> Launch {
    let side = |base| PagesArgs { base, stride: PAGE, table: 0 };
    let (threads, stages) = match kernel {
        Kernel::Any => (args::ANY_THREADS, 0),
        Kernel::Vector => (args::VECTOR_THREADS, 0),
        Kernel::Bulk => (args::BULK_THREADS, 4),
    };
    let args = CopyArgs {
        source: side(from),
        target: side(to),
        release: ReleaseArgs::default(),
        page_bytes: PAGE,
        piece_bytes: 1024,
        pieces_per_page: 4,
        piece_count: 4 * count,
        page_count: count,
        stage_bytes: 1024,
        stage_count: stages,
        turns: TurnsArgs { dealt: 4 * count, pieces: 1, ..TurnsArgs::default() },
    };
    Launch { kernel, threads, shared_bytes: args::BULK_WARPS * 1024 * stages, args }
}

impl Launch {
    pub fn releasing(mut self, kind: u32, word: u64, value: u64, arrivals: u64) -> Self {
        self.args.release = ReleaseArgs { word, value, arrivals, kind, reserved: 0 };
        self
    }

    /// The first `dealt` pieces are dealt, the others make up turns of so many, which `asked` counts.
    pub fn in_turns(mut self, dealt: u32, pieces: u32, asked: u64) -> Self {
        let count = (self.args.piece_count - dealt).div_ceil(pieces);
        self.args.turns = TurnsArgs { asked, dealt, pieces, count, reserved: 0 };
        self
    }

    pub fn with(mut self, change: impl FnOnce(&mut CopyArgs)) -> Self {
        change(&mut self.args);
        self
    }
}

/// `CUmemAllocationProp` of memory of GPU `id`, to be sent by its descriptor.
pub fn properties(id: i32) -> cu::CUmemAllocationProp {
    // SAFETY: numbers and addresses, of which zero is one, but for the two kinds that have none, and are set below.
    let mut properties: std::mem::MaybeUninit<cu::CUmemAllocationProp> =
        std::mem::MaybeUninit::zeroed();
    let to = properties.as_mut_ptr();
    // SAFETY: fields of a structure that is ours; then all of them have values of their types.
    unsafe {
        (*to).type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        (*to).requestedHandleTypes =
            cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        (*to).location = location(id);
        properties.assume_init()
    }
}

pub fn location(id: i32) -> cu::CUmemLocation {
    cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// 2 MiB.
pub const GRANULE: usize = 2 << 20;

/// Maps what the handles name, one after the other, 2 MiB each; nobody has access yet.
pub fn map(handles: &[u64]) -> u64 {
    let address = got!(cuMemAddressReserve(handles.len() * GRANULE, 0, 0, 0));
    for (i, &handle) in handles.iter().enumerate() {
        ok!(cuMemMap(address + (i * GRANULE) as u64, GRANULE, 0, handle, 0));
    }
    address
}

pub fn allow(address: u64, bytes: usize, id: i32, flags: cu::CUmemAccess_flags) -> CUresult {
    let access = cu::CUmemAccessDesc { location: location(id), flags };
    call!(cuMemSetAccess(address, bytes, &raw const access, 1))
}

pub const READ: cu::CUmemAccess_flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
pub const WRITE: cu::CUmemAccess_flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// A pointer attribute, or the answer.
pub fn attribute<T: Default>(which: cu::CUpointer_attribute, address: u64) -> Result<T, CUresult> {
    let mut value = T::default();
    match call!(cuPointerGetAttribute((&raw mut value).cast(), which, address)) {
        CUresult::CUDA_SUCCESS => Ok(value),
        code => Err(code),
    }
}

/// The library's function of this name, which is no driver's.
fn no_driver_s<F: Copy>(name: &std::ffi::CStr) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: it is loaded; a name; and `F` is the type of the function of that name (`nic.rs`).
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        std::mem::transmute_copy(&found)
    }
}

/// How many calls wait for their GPUs, and few others get through.
pub fn kept_waiting() -> u64 {
    no_driver_s::<extern "C" fn() -> u64>(c"immwire_fake_cuda_kept_waiting")()
}

/// How much there is that was taken by hand.
pub fn kept() -> u64 {
    no_driver_s::<extern "C" fn() -> u64>(c"immwire_fake_cuda_kept")()
}

/// Memory right behind an allocation; 0: there is no room.
pub fn alloc_behind(before: u64, bytes: u64) -> u64 {
    no_driver_s::<extern "C" fn(u64, u64) -> u64>(c"immwire_fake_cuda_alloc_behind")(before, bytes)
}

pub fn import(file: i32) -> u64 {
    no_driver_s::<extern "C" fn(i32) -> u64>(c"immwire_fake_cuda_import")(file)
}

/// A range as a NIC has it.
pub struct Import {
    handle: u64,
    offset: u64,
}

impl Import {
    pub fn of(ordinal: u32, address: u64, bytes: u64) -> Self {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let device = immwire_cuda::Device::open(ordinal).unwrap();
        let file = immwire_cuda::DmaBuf::new(&device, address, bytes, 4096).unwrap();
        let handle = import(file.as_fd().as_raw_fd());
        assert_ne!(handle, 0);
        Self { handle, offset: file.offset() }
    }

    pub fn write(&self, at: u64, bytes: &[u8]) -> bool {
        type Call = extern "C" fn(u64, u64, *const u8, u64) -> i32;
        let call: Call = no_driver_s(c"immwire_fake_cuda_nic_write");
        call(self.handle, self.offset + at, bytes.as_ptr(), bytes.len() as u64) != 0
    }

    pub fn read(&self, at: u64, bytes: usize) -> Option<Vec<u8>> {
        type Call = extern "C" fn(u64, u64, *mut u8, u64) -> i32;
        let call: Call = no_driver_s(c"immwire_fake_cuda_nic_read");
        let mut read = vec![0; bytes];
        let whole = call(self.handle, self.offset + at, read.as_mut_ptr(), bytes as u64) != 0;
        whole.then_some(read)
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        no_driver_s::<extern "C" fn(u64)>(c"immwire_fake_cuda_release")(self.handle);
    }
}
