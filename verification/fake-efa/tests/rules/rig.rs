//! What the tests stand on: a process of their own each, and endpoints without ceremony.

use std::ffi::{CStr, CString, c_int, c_void};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use libfabric_sys::{self as sys, Library};

/// The API version that the tests ask for.
pub const API: u32 = sys::FI_VERSION(1, 20);
/// How long anything may take here.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `body` in a process of its own, with the library's environment set: variables are read once a process. The seed
/// is 1, or the `FAKE_EFA_SEED` that the tests are run with.
pub fn alone(name: &str, environment: &[(&str, &str)], body: impl FnOnce(Fake)) {
    if std::env::var("FAKE_EFA_TEST").is_ok_and(|test| test == name) {
        std::fs::write(std::env::var_os("FAKE_EFA_RAN").unwrap(), name).unwrap();
        return body(Fake::load());
    }
    let (log, ran) =
        (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("FAKE_EFA_TEST", name)
        .env("FAKE_EFA_LOG", log.path())
        .env("FAKE_EFA_RAN", ran.path())
        .env("FAKE_EFA_SEED", std::env::var("FAKE_EFA_SEED").unwrap_or("1".into()))
        .envs(environment.iter().copied())
        .status()
        .unwrap();
    assert!(status.success(), "{name}: {status}");
    assert_eq!(std::fs::read_to_string(ran.path()).unwrap(), name, "there is no test of this name");
}

/// Runs `body`, which breaks a rule, in a process of its own for which no log is named; returns what that said before it was aborted.
pub fn unheard(name: &str, body: impl FnOnce(Fake)) -> String {
    if std::env::var("FAKE_EFA_TEST").is_ok_and(|test| test == name) {
        body(Fake::load());
        std::process::exit(0);
    }
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("FAKE_EFA_TEST", name)
        .env_remove("FAKE_EFA_LOG")
        .output()
        .unwrap();
    assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{}", ended.status);
    String::from_utf8(ended.stderr).unwrap()
}

/// Starts the same test again, as another process with a role: `body` runs there, and talks by lines.
pub fn peer(role: &str, environment: &[(&str, &str)]) -> Peer {
    let name = std::env::var("FAKE_EFA_TEST").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env("FAKE_EFA_ROLE", role)
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    Peer { child, lines }
}

/// The role of this process, if it is a [`peer`].
pub fn role() -> Option<String> {
    std::env::var("FAKE_EFA_ROLE").ok()
}

/// Another process.
pub struct Peer {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Peer {
    /// Tells it something.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Returns what it says next; what the test harness says of itself is left out.
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

    /// Stops it: it is there, and does nothing. Once none of its threads runs any more.
    pub fn stop(&self) {
        let (child, mut status) = (self.child.id().cast_signed(), 0);
        // SAFETY: it is a child of ours that was not waited for, and is not by this: it has not ended. `status` is ours.
        unsafe {
            assert_eq!(libc::kill(child, libc::SIGSTOP), 0);
            assert_eq!(libc::waitpid(child, &raw mut status, libc::WUNTRACED), child);
        }
        assert!(libc::WIFSTOPPED(status), "{status:#x}");
    }

    /// Kills it, as a crash would.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it has ended well.
    pub fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

/// Says a line to the process that started this one.
pub fn say(line: &str) {
    println!("says {line}");
}

/// Returns what the process that started this one says next.
pub fn hear() -> String {
    let mut line = String::new();
    assert_ne!(std::io::stdin().read_line(&mut line).unwrap(), 0, "nobody speaks any more");
    line.trim_end().to_owned()
}

/// The library.
#[derive(Clone, Copy)]
pub struct Fake {
    pub library: &'static Library,
}

impl Fake {
    fn load() -> Self {
        let deps = std::env::current_exe().unwrap();
        let deps = deps.parent().unwrap();
        let name = "libfake_efa.so";
        let paths: [PathBuf; 2] = [deps.join(name), deps.parent().unwrap().join(name)];
        let path = paths
            .iter()
            .find(|path| path.exists())
            .expect("cargo builds the library before its tests");
        Self { library: Library::load_from(path).unwrap() }
    }

    /// Returns hints that a caller of `efa-direct` gives; `change` makes them others.
    pub fn hints(self, change: impl FnOnce(&mut sys::fi_info)) -> Info {
        // SAFETY: the library makes it, with all its attributes, and `Info` frees it.
        unsafe {
            let info = self.library.dupinfo(std::ptr::null());
            let hints = &mut *info;
            hints.caps = sys::FI_MSG | sys::FI_RMA | sys::FI_SOURCE;
            hints.mode = sys::FI_CONTEXT2;
            (*hints.ep_attr).type_ = sys::FI_EP_RDM;
            let domain = &mut *hints.domain_attr;
            domain.mr_mode = sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY;
            (domain.cq_data_size, domain.threading) = (4, sys::FI_THREAD_SAFE);
            (*hints.fabric_attr).name = text("efa-direct");
            change(hints);
            Info { info, library: self.library }
        }
    }

    /// Returns what there is for the hints, or the error.
    pub fn getinfo(self, version: u32, hints: Option<&Info>) -> Result<Info, c_int> {
        let mut info = null_mut();
        let hints = hints.map_or(null_mut(), |hints| hints.info);
        // SAFETY: the hints are the library's.
        let result = unsafe {
            self.library.getinfo(
                version,
                std::ptr::null(),
                std::ptr::null(),
                0,
                hints,
                &raw mut info,
            )
        };
        if result == 0 { Ok(Info { info, library: self.library }) } else { Err(-result) }
    }

    /// Returns the first thing there is for the usual hints.
    pub fn info(self) -> Info {
        self.getinfo(API, Some(&self.hints(|_| {}))).unwrap()
    }

    /// Returns the rules that the log says were broken, in order.
    pub fn violations(self) -> Vec<String> {
        let lines = log_lines();
        lines.iter().filter_map(|line| line["violation"].as_str().map(str::to_owned)).collect()
    }

    /// Demands that exactly these rules were broken.
    #[track_caller]
    pub fn broken(self, rules: &[&str]) {
        assert_eq!(self.violations(), rules, "{:#?}", log_lines());
    }
}

/// Returns the hints' attributes of the domain.
pub fn domain(hints: &mut sys::fi_info) -> &mut sys::fi_domain_attr {
    // SAFETY: the library made the hints, with all their attributes.
    unsafe { &mut *hints.domain_attr }
}

/// Returns the hints' attributes of the fabric.
pub fn fabric(hints: &mut sys::fi_info) -> &mut sys::fi_fabric_attr {
    // SAFETY: as in `domain`.
    unsafe { &mut *hints.fabric_attr }
}

/// Returns the hints' attributes of the endpoint.
pub fn endpoint(hints: &mut sys::fi_info) -> &mut sys::fi_ep_attr {
    // SAFETY: as in `domain`.
    unsafe { &mut *hints.ep_attr }
}

/// Returns the hints' attributes of sending.
pub fn sending(hints: &mut sys::fi_info) -> &mut sys::fi_tx_attr {
    // SAFETY: as in `domain`.
    unsafe { &mut *hints.tx_attr }
}

/// Puts another name of the fabric, or null, into the hints.
pub fn name_fabric(hints: &mut sys::fi_info, name: *mut std::ffi::c_char) {
    let name = std::mem::replace(&mut fabric(hints).name, name);
    // SAFETY: it was a string of the C library's, or null.
    unsafe { libc::free(name.cast()) };
}

/// Returns the log. The last line may be half written, by another thread: it is left for the next look.
pub fn log_lines() -> Vec<serde_json::Value> {
    let log = std::fs::read_to_string(std::env::var_os("FAKE_EFA_LOG").unwrap()).unwrap();
    let whole = log.rfind('\n').map_or("", |end| &log[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the sum of a number over the log's events of a name.
pub fn logged(event: &str, number: &str) -> u64 {
    log_lines()
        .iter()
        .filter(|line| line["event"] == event)
        .map(|line| line[number].as_u64().unwrap())
        .sum()
}

/// Returns a string as `fi_freeinfo` frees it.
pub fn text(text: &str) -> *mut std::ffi::c_char {
    let text = CString::new(text).unwrap();
    // SAFETY: a C string.
    unsafe { libc::strdup(text.as_ptr()) }
}

/// Returns a string of the library's.
pub fn read(text: *const std::ffi::c_char) -> String {
    assert!(!text.is_null());
    // SAFETY: a C string.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

/// A list of `fi_info`.
pub struct Info {
    pub info: *mut sys::fi_info,
    library: &'static Library,
}

impl Info {
    /// Returns the infos of the list.
    pub fn all(&self) -> Vec<&sys::fi_info> {
        let mut all = Vec::new();
        let mut next = self.info;
        // SAFETY: the list is the library's, and lives.
        while let Some(info) = unsafe { next.as_ref() } {
            all.push(info);
            next = info.next;
        }
        all
    }

    /// Returns the first.
    pub fn first(&self) -> &sys::fi_info {
        self.all()[0]
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: the list is the library's, and not used any more.
        unsafe { self.library.freeinfo(self.info) };
    }
}

/// Returns a domain's objects for an `fi_info`, none of them yet.
pub struct Node {
    pub info: Info,
    pub fabric: *mut sys::fid_fabric,
    pub domain: *mut sys::fid_domain,
}

/// Demands success.
#[track_caller]
pub fn fine(result: c_int) {
    assert_eq!(result, 0);
}

impl Node {
    /// Opens the first device of `info`.
    pub fn open(fake: Fake, info: Info) -> Self {
        let (mut fabric, mut domain) = (null_mut(), null_mut());
        // SAFETY: `info` is the library's.
        unsafe {
            fine(fake.library.fabric(info.first().fabric_attr, &raw mut fabric, null_mut()));
            fine(sys::fi_domain(fabric, info.info, &raw mut domain, null_mut()));
        }
        Self { info, fabric, domain }
    }

    /// Opens a completion queue.
    pub fn cq(&self, size: usize, wait_obj: sys::fi_wait_obj) -> *mut sys::fid_cq {
        let mut cq = null_mut();
        // SAFETY: zero is a value of it.
        let mut attr: sys::fi_cq_attr = unsafe { std::mem::zeroed() };
        (attr.size, attr.format, attr.wait_obj) = (size, sys::FI_CQ_FORMAT_DATA, wait_obj);
        // SAFETY: the domain is open.
        fine(unsafe { sys::fi_cq_open(self.domain, &raw mut attr, &raw mut cq, null_mut()) });
        cq
    }

    /// Opens an address vector.
    pub fn av(&self) -> *mut sys::fid_av {
        let mut av = null_mut();
        // SAFETY: zero is a value of it.
        let mut attr: sys::fi_av_attr = unsafe { std::mem::zeroed() };
        attr.type_ = sys::FI_AV_TABLE;
        // SAFETY: the domain is open.
        fine(unsafe { sys::fi_av_open(self.domain, &raw mut attr, &raw mut av, null_mut()) });
        av
    }

    /// Opens an endpoint.
    pub fn ep(&self) -> *mut sys::fid_ep {
        let mut ep = null_mut();
        // SAFETY: the domain is open, the info is its.
        fine(unsafe { sys::fi_endpoint(self.domain, self.info.info, &raw mut ep, null_mut()) });
        ep
    }

    /// Opens an endpoint with a queue of `size` entries, and enables it.
    pub fn side(&self, size: usize) -> Side {
        self.side_with(self.cq(size, sys::FI_WAIT_NONE))
    }

    /// The same with a queue that is open.
    pub fn side_with(&self, cq: *mut sys::fid_cq) -> Side {
        let (av, ep) = (self.av(), self.ep());
        // SAFETY: all are open, and of one domain.
        unsafe {
            fine(sys::fi_ep_bind(ep, &raw mut (*cq).fid, sys::FI_TRANSMIT | sys::FI_RECV));
            fine(sys::fi_ep_bind(ep, &raw mut (*av).fid, 0));
            fine(sys::fi_enable(ep));
        }
        Side { cq, av, ep }
    }

    /// Registers `bytes` new bytes, each `fill`, for everything.
    pub fn memory(&self, bytes: usize, fill: u8) -> Memory {
        let all = sys::FI_SEND
            | sys::FI_RECV
            | sys::FI_READ
            | sys::FI_WRITE
            | sys::FI_REMOTE_READ
            | sys::FI_REMOTE_WRITE;
        self.memory_for(bytes, fill, all)
    }

    /// Registers `bytes` new bytes, each `fill`.
    pub fn memory_for(&self, bytes: usize, fill: u8, access: u64) -> Memory {
        let buffer: Box<[u8]> = vec![fill; bytes].into();
        let (buffer, mut mr) = (Box::into_raw(buffer), null_mut());
        // SAFETY: the domain is open; the memory stays until the registration is closed, in `Memory`'s `drop`.
        fine(unsafe {
            sys::fi_mr_reg(
                self.domain,
                buffer.cast(),
                bytes,
                access,
                0,
                0,
                0,
                &raw mut mr,
                null_mut(),
            )
        });
        Memory { buffer, mr, open: true }
    }

    /// Closes it, and demands that nothing is left on it.
    pub fn close(self) {
        // SAFETY: both are open, and not used any more.
        unsafe {
            fine(sys::fi_close(&raw mut (*self.domain).fid));
            fine(sys::fi_close(&raw mut (*self.fabric).fid));
        }
    }
}

/// Memory that is registered.
pub struct Memory {
    buffer: *mut [u8],
    pub mr: *mut sys::fid_mr,
    open: bool,
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.buffer.cast::<u8>() as u64
    }

    pub fn pointer(&self) -> *mut c_void {
        self.buffer.cast()
    }

    pub fn desc(&self) -> *mut c_void {
        // SAFETY: the structure is never freed.
        unsafe { sys::fi_mr_desc(self.mr) }
    }

    pub fn key(&self) -> u64 {
        // SAFETY: the structure is never freed.
        unsafe { sys::fi_mr_key(self.mr) }
    }

    /// Returns a byte, which the device may be writing to.
    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.buffer.len());
        // SAFETY: it is inside, and lives.
        unsafe { self.buffer.cast::<u8>().add(at).read_volatile() }
    }

    pub fn fill(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.buffer.len());
        // SAFETY: it is inside, and lives.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.buffer.cast::<u8>().add(at),
                bytes.len(),
            )
        };
    }

    /// Ends the registration, not the memory.
    pub fn close(&mut self) {
        assert!(std::mem::take(&mut self.open));
        // SAFETY: it is open.
        fine(unsafe { sys::fi_close(&raw mut (*self.mr).fid) });
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.open && !std::thread::panicking() {
            self.close();
        }
        if !self.open {
            // SAFETY: it was a box, and the device is done with it.
            drop(unsafe { Box::from_raw(self.buffer) });
        }
    }
}

/// An operation's context.
pub fn context() -> Box<sys::fi_context2> {
    Box::new(sys::fi_context2 { internal: [null_mut(); 8] })
}

/// The address of a context, as operations take and report it.
pub fn at(context: &mut sys::fi_context2) -> *mut c_void {
    std::ptr::from_mut(context).cast()
}

/// A completion, or a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    Done {
        context: usize,
        flags: u64,
        len: usize,
        data: u64,
        from: u64,
    },
    Failed {
        context: usize,
        err: c_int,
        prov: c_int,
    },
    /// The queue is dead.
    Dead,
}

/// An enabled endpoint.
pub struct Side {
    pub cq: *mut sys::fid_cq,
    pub av: *mut sys::fid_av,
    pub ep: *mut sys::fid_ep,
}

impl Side {
    pub fn address(&self) -> [u8; 32] {
        let (mut address, mut len) = ([0; 32], 32);
        // SAFETY: there is room for `len` bytes.
        fine(unsafe { sys::fi_getname(self.ep, address.as_mut_ptr().cast(), &raw mut len) });
        assert_eq!(len, 32);
        address
    }

    pub fn insert(&self, address: [u8; 32]) -> u64 {
        let mut number = 0;
        // SAFETY: one address, one number.
        let count = unsafe {
            sys::fi_av_insert(self.av, address.as_ptr().cast(), 1, &raw mut number, 0, null_mut())
        };
        assert_eq!(count, 1);
        number
    }

    pub fn remove(&self, mut number: u64) -> c_int {
        // SAFETY: one number.
        unsafe { sys::fi_av_remove(self.av, &raw mut number, 1, 0) }
    }

    /// Returns the next event if there is one.
    pub fn poll(&self) -> Option<Event> {
        // SAFETY: zero is a value of them; there is room for one.
        unsafe {
            let (mut entry, mut from): (sys::fi_cq_data_entry, u64) = (std::mem::zeroed(), 0);
            match sys::fi_cq_readfrom(self.cq, (&raw mut entry).cast(), 1, &raw mut from) {
                1 => {
                    let context = entry.op_context as usize;
                    let (flags, len, data) = (entry.flags, entry.len, entry.data);
                    Some(Event::Done { context, flags, len, data, from })
                }
                error if error == -(sys::FI_EAGAIN as isize) => None,
                error if error == -(sys::FI_EOVERRUN as isize) => Some(Event::Dead),
                error if error == -(sys::FI_EAVAIL as isize) => {
                    let mut entry: sys::fi_cq_err_entry = std::mem::zeroed();
                    assert_eq!(sys::fi_cq_readerr(self.cq, &raw mut entry, 0), 1);
                    let context = entry.op_context as usize;
                    let (err, prov) = (entry.err, entry.prov_errno);
                    assert!(
                        !read(sys::fi_cq_strerror(self.cq, prov, std::ptr::null(), null_mut(), 0))
                            .is_empty()
                    );
                    Some(Event::Failed { context, err, prov })
                }
                other => panic!("fi_cq_readfrom: {other}"),
            }
        }
    }

    /// Waits for the next event.
    #[track_caller]
    pub fn next(&self) -> Event {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(event) = self.poll() {
                return event;
            }
            assert!(Instant::now() < end, "nothing came");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Demands that nothing comes for a while.
    #[track_caller]
    pub fn quiet(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            assert_eq!(self.poll(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the next event, a failure, and returns its libfabric and provider error.
    #[track_caller]
    pub fn failure(&self) -> (c_int, c_int) {
        match self.next() {
            Event::Failed { err, prov, .. } => (err, prov),
            other => panic!("{other:?}"),
        }
    }

    /// Posts until the queue takes it; returns what else it said.
    #[track_caller]
    pub fn post(&self, write: &Write<'_>, context: *mut c_void) -> isize {
        let end = Instant::now() + PATIENCE;
        loop {
            let result = self.try_post(write, context);
            if result != -(sys::FI_EAGAIN as isize) {
                return result;
            }
            assert!(Instant::now() < end, "the queue stays full");
        }
    }

    pub fn try_post(&self, write: &Write<'_>, context: *mut c_void) -> isize {
        let Write { memory, offset, len, data, to, address, key } = *write;
        let (ep, buf, desc) = (self.ep, memory.pointer().wrapping_byte_add(offset), memory.desc());
        // SAFETY: the tests keep memory and contexts, or test that they did not.
        unsafe {
            match data {
                Some(data) => {
                    sys::fi_writedata(ep, buf, len, desc, data, to, address, key, context)
                }
                None => sys::fi_write(ep, buf, len, desc, to, address, key, context),
            }
        }
    }

    /// Closes the endpoint and what it stood on.
    pub fn close(self) {
        self.close_ep();
        // SAFETY: both are open, and not used any more.
        unsafe {
            fine(sys::fi_close(&raw mut (*self.av).fid));
            fine(sys::fi_close(&raw mut (*self.cq).fid));
        }
    }

    /// Closes the endpoint only.
    pub fn close_ep(&self) {
        // SAFETY: it is open.
        fine(unsafe { sys::fi_close(&raw mut (*self.ep).fid) });
    }
}

/// A write to post.
#[derive(Clone, Copy)]
pub struct Write<'a> {
    pub memory: &'a Memory,
    pub offset: usize,
    pub len: usize,
    pub data: Option<u64>,
    pub to: u64,
    pub address: u64,
    pub key: u64,
}

/// Two endpoints that know each other, in one domain.
pub struct Pair {
    pub node: Node,
    pub a: Side,
    pub b: Side,
    /// What `a` calls `b`.
    pub to_b: u64,
    /// What `b` calls `a`.
    pub to_a: u64,
}

impl Pair {
    pub fn new(fake: Fake) -> Self {
        Self::of(Node::open(fake, fake.info()))
    }

    pub fn of(node: Node) -> Self {
        let (a, b) = (node.side(256), node.side(256));
        let (to_b, to_a) = (a.insert(b.address()), b.insert(a.address()));
        Self { node, a, b, to_b, to_a }
    }

    pub fn close(self) {
        self.a.close();
        self.b.close();
        self.node.close();
    }
}
