//! Real libraries: found, loaded side by side, and driven through every call that [`libfabric_sys::inline`] has for them.
//!
//! An endpoint writes to itself over TCP on the loopback interface. The libraries are those that
//! `IMMWIRE_LIBFABRIC_TEST` names (paths, separated by colons; the script `fetch` gets a recent one), else the one that
//! [`Library::load`] finds. Where there is none this fails, unless `IMMWIRE_WITHOUT_LIBFABRIC=1` says that it is meant.

// Helpers outside of `#[test]` functions may do what those may.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};
use std::{env, mem};

use libfabric_sys::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// The libraries to test; empty if there is none, and that is meant.
fn libraries() -> Vec<&'static Library> {
    if let Some(paths) = env::var_os("IMMWIRE_LIBFABRIC_TEST").filter(|paths| !paths.is_empty()) {
        let paths = env::split_paths(&paths).filter(|path| !path.as_os_str().is_empty());
        return paths
            .map(|path| Library::load_from(path).unwrap_or_else(|e| panic!("{e}")))
            .collect();
    }
    match Library::load() {
        Ok(library) => vec![library],
        Err(error)
            if env::var_os("IMMWIRE_WITHOUT_LIBFABRIC").is_some_and(|value| value == "1") =>
        {
            println!("NOT RUN: IMMWIRE_WITHOUT_LIBFABRIC=1, and {error}");
            Vec::new()
        }
        Err(error) => panic!("{error}; or set IMMWIRE_WITHOUT_LIBFABRIC=1 to go without this test"),
    }
}

/// What each version has for reliable datagrams over TCP.
fn providers(version: Version) -> &'static [&'static str] {
    match (version.major, version.minor) {
        (1, ..=15) => &["tcp;ofi_rxm"],
        (1, 16 | 17) => &["net", "tcp;ofi_rxm"],
        _ => &["tcp"],
    }
}

fn ok(library: &Library, what: &str, code: impl Into<i64>) {
    let code = code.into();
    let errnum = i32::try_from(-code).unwrap();
    assert_eq!(code, 0, "{what}: {}", library.strerror(errnum));
}

/// The objects of one endpoint on `provider`.
struct Endpoint {
    library: &'static Library,
    info: *mut fi_info,
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    cq: *mut fid_cq,
    av: *mut fid_av,
    ep: *mut fid_ep,
    /// The endpoint's number for itself.
    own: fi_addr_t,
}

impl Endpoint {
    fn open(library: &'static Library, provider: &str) -> Endpoint {
        // SAFETY: the calls of a program in C, in the order and with the arguments that the man pages ask for: every
        // object was opened by an earlier call that succeeded, attributes and results are locals, and strings that the
        // library frees are from malloc.
        unsafe {
            let hints = library.dupinfo(null());
            let domain_attr = (*hints).domain_attr;
            (*hints).caps = FI_MSG | FI_RMA;
            (*hints).mode = FI_CONTEXT | FI_CONTEXT2;
            (*(*hints).ep_attr).type_ = FI_EP_RDM;
            (*domain_attr).mr_mode =
                FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
            (*domain_attr).threading = FI_THREAD_SAFE;
            (*domain_attr).cq_data_size = 4;
            let name = CString::new(provider).unwrap();
            (*(*hints).fabric_attr).prov_name = libc::strdup(name.as_ptr());
            let mut info = null_mut();
            let api = library.version().min(Version { major: 1, minor: 20 });
            let node = c"127.0.0.1".as_ptr();
            let code = library.getinfo(api.code(), node, null(), FI_SOURCE, hints, &raw mut info);
            ok(library, &format!("{provider}: fi_getinfo"), code);
            library.freeinfo(hints);
            let got = CStr::from_ptr((*(*info).fabric_attr).prov_name);
            assert_eq!(got.to_bytes(), provider.as_bytes());
            // The copy has what the original has, across all that it points to.
            let copy = library.dupinfo(info);
            assert_eq!((*(*copy).ep_attr).max_msg_size, (*(*info).ep_attr).max_msg_size);
            assert_eq!((*(*copy).domain_attr).mr_cnt, (*(*info).domain_attr).mr_cnt);
            library.freeinfo(copy);

            let mut fabric = null_mut();
            ok(
                library,
                "fi_fabric",
                library.fabric((*info).fabric_attr, &raw mut fabric, null_mut()),
            );
            let mut domain = null_mut();
            ok(library, "fi_domain", fi_domain(fabric, info, &raw mut domain, null_mut()));
            let mut cq_attr: fi_cq_attr = mem::zeroed();
            cq_attr.size = 128;
            cq_attr.format = FI_CQ_FORMAT_DATA;
            cq_attr.wait_obj = FI_WAIT_FD;
            let mut cq = null_mut();
            ok(
                library,
                "fi_cq_open",
                fi_cq_open(domain, &raw mut cq_attr, &raw mut cq, null_mut()),
            );
            let mut av_attr: fi_av_attr = mem::zeroed();
            av_attr.type_ = FI_AV_TABLE;
            let mut av = null_mut();
            ok(
                library,
                "fi_av_open",
                fi_av_open(domain, &raw mut av_attr, &raw mut av, null_mut()),
            );
            let mut ep = null_mut();
            ok(library, "fi_endpoint", fi_endpoint(domain, info, &raw mut ep, null_mut()));
            let cq_fid = &raw mut (*cq).fid;
            ok(library, "bind cq", fi_ep_bind(ep, cq_fid, FI_TRANSMIT | FI_RECV));
            ok(library, "bind av", fi_ep_bind(ep, &raw mut (*av).fid, 0));
            ok(library, "fi_enable", fi_enable(ep));
            let mut endpoint =
                Endpoint { library, info, fabric, domain, cq, av, ep, own: FI_ADDR_UNSPEC };
            endpoint.own = endpoint.insert_own();
            endpoint
        }
    }

    /// Puts the endpoint's own address into its table of addresses, and looks at it there.
    fn insert_own(&self) -> fi_addr_t {
        // SAFETY: as in `open`; lengths are those of the arrays.
        unsafe {
            let mut name = [0_u8; 256];
            let mut short = 1_usize;
            let code = fi_getname(self.ep, name.as_mut_ptr().cast(), &raw mut short);
            assert_eq!(code, -FI_ETOOSMALL);
            let mut length = name.len();
            let code = fi_getname(self.ep, name.as_mut_ptr().cast(), &raw mut length);
            ok(self.library, "fi_getname", code);
            assert_eq!(short, length);
            let mut own = FI_ADDR_UNSPEC;
            let done = fi_av_insert(self.av, name.as_ptr().cast(), 1, &raw mut own, 0, null_mut());
            assert_eq!(done, 1, "fi_av_insert");
            let mut again = [0_u8; 256];
            let mut room = again.len();
            let code = fi_av_lookup(self.av, own, again.as_mut_ptr().cast(), &raw mut room);
            ok(self.library, "fi_av_lookup", code);
            assert_eq!((room, &again[..length]), (length, &name[..length]));
            let (mut text, mut size) = ([0; 128], 128_usize);
            let said =
                fi_av_straddr(self.av, name.as_ptr().cast(), text.as_mut_ptr(), &raw mut size);
            assert!(!said.is_null());
            assert!(CStr::from_ptr(said).to_str().unwrap().contains("127.0.0.1"));
            own
        }
    }

    /// Registers `memory` for everything; by `fi_mr_reg` or `fi_mr_regattr`.
    fn register(&self, memory: &mut [u8], key: u64, by_attr: bool) -> *mut fid_mr {
        let access = FI_WRITE | FI_READ | FI_REMOTE_WRITE | FI_REMOTE_READ | FI_SEND | FI_RECV;
        let (start, len) = (memory.as_mut_ptr().cast::<c_void>(), memory.len());
        let mut mr = null_mut();
        // SAFETY: as in `open`; the memory outlives the endpoint in each test.
        let code = unsafe {
            if by_attr {
                let iov = iovec { iov_base: start, iov_len: len };
                let mut attr: fi_mr_attr = mem::zeroed();
                attr.mr_iov = &raw const iov;
                attr.iov_count = 1;
                attr.access = access;
                attr.requested_key = key;
                attr.iface = FI_HMEM_SYSTEM;
                fi_mr_regattr(self.domain, &raw const attr, 0, &raw mut mr)
            } else {
                fi_mr_reg(self.domain, start, len, access, 0, key, 0, &raw mut mr, null_mut())
            }
        };
        ok(self.library, "registration", code);
        mr
    }

    /// The address that a write to the start of `memory` names.
    fn remote_address(&self, memory: &[u8]) -> u64 {
        // SAFETY: `info` is live as long as the endpoint.
        let mode = unsafe { (*(*self.info).domain_attr).mr_mode };
        if mode & FI_MR_VIRT_ADDR != 0 { memory.as_ptr() as u64 } else { 0 }
    }

    /// Posts until it is accepted, reading completions meanwhile into `seen`.
    fn post(&self, seen: &mut Vec<fi_cq_data_entry>, mut post: impl FnMut() -> isize) {
        let end = Instant::now() + PATIENCE;
        loop {
            match post() {
                0 => return,
                code if code == -(FI_EAGAIN as isize) => {}
                code => panic!("post: {}", self.library.strerror(i32::try_from(-code).unwrap())),
            }
            assert!(Instant::now() < end, "the provider accepts nothing");
            self.read(seen);
        }
    }

    fn read(&self, seen: &mut Vec<fi_cq_data_entry>) {
        // SAFETY: the queue is live, and all zero is an entry; the array has room for as many as are asked for.
        unsafe {
            let mut entries: [fi_cq_data_entry; 8] = mem::zeroed();
            let count = fi_cq_read(self.cq, entries.as_mut_ptr().cast(), entries.len());
            if count == -(FI_EAVAIL as isize) {
                panic!("a completion in error: {:?}", self.failed());
            }
            if count == -(FI_EAGAIN as isize) {
                return;
            }
            seen.extend_from_slice(&entries[..usize::try_from(count).unwrap()]);
        }
    }

    /// Sleeps on the queue's file descriptor, as long as it may, until `enough` is seen.
    fn until(
        &self,
        seen: &mut Vec<fi_cq_data_entry>,
        enough: impl Fn(&[fi_cq_data_entry]) -> bool,
    ) {
        let end = Instant::now() + PATIENCE;
        // SAFETY: as in `open`; FI_GETWAIT on a queue with FI_WAIT_FD stores an `int`.
        unsafe {
            let mut fd = -1_i32;
            let fid = &raw mut (*self.cq).fid;
            ok(self.library, "FI_GETWAIT", fi_control(fid, FI_GETWAIT, (&raw mut fd).cast()));
            assert!(fd >= 0);
            loop {
                self.read(seen);
                if enough(seen) {
                    return;
                }
                assert!(Instant::now() < end, "not within {PATIENCE:?}; seen {seen:?}");
                let mut fids = [fid];
                match fi_trywait(self.fabric, fids.as_mut_ptr(), 1) {
                    0 => {
                        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                        assert!(libc::poll(&raw mut poll, 1, 100) >= 0);
                    }
                    code => assert_eq!(code, -FI_EAGAIN, "fi_trywait"),
                }
            }
        }
    }

    /// The next completion in error, and the provider's words for it.
    fn failed(&self) -> (fi_cq_err_entry, String) {
        // SAFETY: as in `open`; all zero is an entry, and means that there is no room for `err_data`.
        unsafe {
            let mut entry: fi_cq_err_entry = mem::zeroed();
            assert_eq!(fi_cq_readerr(self.cq, &raw mut entry, 0), 1);
            let mut words = [0; 128];
            let said =
                fi_cq_strerror(self.cq, entry.prov_errno, entry.err_data, words.as_mut_ptr(), 128);
            let said = if said.is_null() { c"" } else { CStr::from_ptr(said) };
            (entry, said.to_string_lossy().into_owned())
        }
    }

    fn close(self) {
        // SAFETY: as in `open`; closed in the reverse order, once, and not used any more.
        unsafe {
            ok(self.library, "close ep", fi_close(&raw mut (*self.ep).fid));
            let mut own = self.own;
            ok(self.library, "fi_av_remove", fi_av_remove(self.av, &raw mut own, 1, 0));
            ok(self.library, "close av", fi_close(&raw mut (*self.av).fid));
            ok(self.library, "close cq", fi_close(&raw mut (*self.cq).fid));
            ok(self.library, "close domain", fi_close(&raw mut (*self.domain).fid));
            ok(self.library, "close fabric", fi_close(&raw mut (*self.fabric).fid));
            self.library.freeinfo(self.info);
        }
    }
}

/// A remote event, as told apart on every provider.
fn is_remote(entry: &fi_cq_data_entry) -> bool {
    entry.flags & FI_REMOTE_CQ_DATA != 0 && entry.flags & FI_WRITE == 0
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at * 31 + seed) % 251).unwrap()).collect()
}

/// Writes with and without data, by each call there is; what was written, and told, must be there.
fn writes(library: &'static Library, provider: &str) {
    const LEN: usize = 100_000;
    let endpoint = Endpoint::open(library, provider);
    let (mut source, mut target) = (pattern(4 * LEN, 7), vec![0_u8; 4 * LEN]);
    let local = endpoint.register(&mut source, 1, false);
    let remote = endpoint.register(&mut target, 2, true);
    let mut contexts: [fi_context2; 5] = [fi_context2 { internal: [null_mut(); 8] }; 5];
    let [first, second, third, fourth, fifth] =
        contexts.each_mut().map(|it| (it as *mut fi_context2).cast::<c_void>());
    let mut seen = Vec::new();
    // SAFETY: as in `Endpoint::open`; source, target and contexts live until every operation was seen to complete.
    unsafe {
        let (desc, key) = (fi_mr_desc(local), fi_mr_key(remote));
        let (ep, own, base) = (endpoint.ep, endpoint.own, endpoint.remote_address(&target));
        let from = |part: usize| source.as_ptr().add(part * LEN).cast::<c_void>();
        let to = |part: usize| base + (part * LEN) as u64;
        endpoint.post(&mut seen, || {
            fi_writedata(ep, from(0), LEN, desc, 0xfeed_beef, own, to(0), key, first)
        });
        endpoint.post(&mut seen, || fi_write(ep, from(1), LEN, desc, own, to(1), key, second));
        // One more, built by hand, of two thirds of a part.
        let iov = iovec { iov_base: from(2).cast_mut(), iov_len: LEN * 2 / 3 };
        let rma_iov = fi_rma_iov { addr: to(2), len: LEN * 2 / 3, key };
        let mut descs = [desc];
        let message = fi_msg_rma {
            msg_iov: &raw const iov,
            desc: descs.as_mut_ptr(),
            iov_count: 1,
            addr: own,
            rma_iov: &raw const rma_iov,
            rma_iov_count: 1,
            context: third,
            data: 3,
        };
        let flags = FI_REMOTE_CQ_DATA | FI_COMPLETION;
        endpoint.post(&mut seen, || fi_writemsg(ep, &raw const message, flags));
        // Nothing but the event, with a valid key and address.
        endpoint.post(&mut seen, || fi_writedata(ep, from(3), 0, desc, 4, own, to(3), key, fourth));
        endpoint.until(&mut seen, |seen| seen.len() >= 7);
        let mut told: Vec<u64> =
            seen.iter().filter(|entry| is_remote(entry)).map(|entry| entry.data).collect();
        told.sort_unstable();
        assert_eq!(told, [3, 4, 0xfeed_beef]);
        let mut done: Vec<_> =
            seen.iter().filter(|entry| !is_remote(entry)).map(|entry| entry.op_context).collect();
        done.sort_unstable();
        let mut posted = [first, second, third, fourth];
        posted.sort_unstable();
        assert_eq!(done, posted);
        let written = 2 * LEN + LEN * 2 / 3;
        assert!(target[..written] == source[..written]);
        assert!(target[written..].iter().all(|&byte| byte == 0));

        // And back: reads what it wrote into the rest of the source.
        seen.clear();
        let there = source.as_mut_ptr().add(3 * LEN).cast();
        endpoint.post(&mut seen, || fi_read(ep, there, LEN, desc, own, to(0), key, fifth));
        endpoint.until(&mut seen, |seen| !seen.is_empty());
        assert_eq!((seen.len(), seen[0].op_context), (1, fifth));
        assert!(source[3 * LEN..] == target[..LEN]);
        ok(library, "close mr", fi_close(&raw mut (*remote).fid));
        ok(library, "close mr", fi_close(&raw mut (*local).fid));
    }
    endpoint.close();
}

/// A message; then a receive that is called back: an error entry with all its fields.
fn messages(library: &'static Library, provider: &str) {
    let endpoint = Endpoint::open(library, provider);
    let mut memory = vec![0_u8; 2048];
    memory[..1000].copy_from_slice(&pattern(1000, 3));
    let mr = endpoint.register(&mut memory, 3, true);
    let mut contexts = [fi_context2 { internal: [null_mut(); 8] }; 3];
    let [sent, received, called_back] =
        contexts.each_mut().map(|it| (it as *mut fi_context2).cast::<c_void>());
    let mut seen = Vec::new();
    // SAFETY: as in `writes`.
    unsafe {
        let desc = fi_mr_desc(mr);
        let start = memory.as_mut_ptr();
        let (ep, own, into) = (endpoint.ep, endpoint.own, start.add(1024).cast::<c_void>());
        endpoint.post(&mut seen, || fi_recv(ep, into, 1024, desc, FI_ADDR_UNSPEC, received));
        endpoint.post(&mut seen, || fi_send(ep, start.cast(), 1000, desc, own, sent));
        endpoint.until(&mut seen, |seen| seen.len() >= 2);
        let message = seen.iter().find(|entry| entry.op_context == received).unwrap();
        assert_eq!((message.flags & (FI_MSG | FI_RECV), message.len), (FI_MSG | FI_RECV, 1000));
        assert!(seen.iter().any(|entry| entry.op_context == sent));
        assert!(memory[1024..2024] == memory[..1000]);

        seen.clear();
        endpoint.post(&mut seen, || fi_recv(ep, into, 1024, desc, FI_ADDR_UNSPEC, called_back));
        ok(library, "fi_cancel", fi_cancel(ep, called_back) as i64);
        let end = Instant::now() + PATIENCE;
        let mut entry: fi_cq_data_entry = mem::zeroed();
        let mut source = FI_ADDR_UNSPEC;
        // By the other call for reading.
        while fi_cq_readfrom(endpoint.cq, (&raw mut entry).cast(), 1, &raw mut source)
            == -(FI_EAGAIN as isize)
        {
            assert!(Instant::now() < end, "a receive was cancelled, and nothing is said of it");
        }
        let (failure, words) = endpoint.failed();
        assert_eq!(failure.op_context, called_back);
        assert_eq!(failure.err, FI_ECANCELED);
        println!("  {provider}: cancelled: prov_errno {}: {words}", failure.prov_errno);
        ok(library, "close mr", fi_close(&raw mut (*mr).fid));
    }
    endpoint.close();
}

/// Options, an event queue, and the answers of entries that are not there.
fn the_rest(library: &'static Library, provider: &str) {
    let endpoint = Endpoint::open(library, provider);
    // SAFETY: as in `Endpoint::open`; optval has the type that fi_endpoint(3) gives the option; the last table is a local.
    unsafe {
        let ep = endpoint.ep;
        let nonsense = 1_u64;
        let optval = (&raw const nonsense).cast();
        assert!(
            fi_setopt(ep, FI_OPT_ENDPOINT, 12345, optval, 8) < 0,
            "an option that there is not"
        );
        let (mut value, mut len) = (0_u64, 8_usize);
        assert!(fi_getopt(ep, FI_OPT_ENDPOINT, 12345, (&raw mut value).cast(), &raw mut len) < 0);

        let mut attr: fi_eq_attr = mem::zeroed();
        attr.wait_obj = FI_WAIT_NONE;
        let mut eq = null_mut();
        ok(
            library,
            "fi_eq_open",
            fi_eq_open(endpoint.fabric, &raw mut attr, &raw mut eq, null_mut()),
        );
        let (mut event, mut entry) = (0, mem::zeroed::<fi_eq_entry>());
        let size = mem::size_of::<fi_eq_entry>();
        let code = fi_eq_read(eq, &raw mut event, (&raw mut entry).cast(), size, 0);
        assert_eq!(code, -(FI_EAGAIN as isize));
        let mut failure: fi_eq_err_entry = mem::zeroed();
        assert!(fi_eq_readerr(eq, &raw mut failure, 0) <= 0);
        ok(library, "close eq", fi_close(&raw mut (*eq).fid));

        // The same queue behind a table that ends early, and one that leaves an entry out.
        let whole = (*endpoint.cq).ops;
        let mut table = *whole;
        table.size = mem::offset_of!(fi_ops_cq, readerr);
        table.read = None;
        (*endpoint.cq).ops = &raw mut table;
        assert_eq!(fi_cq_signal(endpoint.cq), -FI_ENOSYS);
        assert_eq!(fi_cq_sread(endpoint.cq, null_mut(), 0, null(), 0), -(FI_ENOSYS as isize));
        assert_eq!(fi_cq_read(endpoint.cq, null_mut(), 0), -(FI_ENOSYS as isize));
        assert!(fi_cq_strerror(endpoint.cq, 0, null(), null_mut(), 0).is_null());
        (*endpoint.cq).ops = whole;
    }
    endpoint.close();
}

#[test]
fn an_endpoint_writes_to_itself() {
    for library in libraries() {
        println!("{} of {}", library.path().display(), library.version());
        for provider in providers(library.version()) {
            writes(library, provider);
            messages(library, provider);
            the_rest(library, provider);
            println!("  {provider}: as expected");
        }
    }
}

#[test]
fn each_library_is_loaded_once_and_says_what_it_is() {
    for library in libraries() {
        let again = Library::load_from(library.path()).unwrap();
        assert!(std::ptr::eq(library, again));
        assert!(library.version() >= Version { major: 1, minor: 9 });
        assert!(library.path().is_absolute() && library.path().exists());
        assert!(!library.strerror(FI_EAGAIN).is_empty());
        assert_ne!(library.strerror(FI_EAVAIL), library.strerror(FI_ENOCQ));
    }
}

#[test]
fn what_cannot_be_loaded_is_said_with_what_to_do() {
    let error = Library::load_from("/nonexistent/libfabric.so.1").unwrap_err();
    assert_eq!(error.tried.len(), 1);
    assert_eq!(error.tried[0].place, "/nonexistent/libfabric.so.1");
    assert!(error.tried[0].why.contains("No such file"), "{}", error.tried[0].why);
    let text = error.to_string();
    assert!(text.contains("install libfabric") && text.contains(ENVIRONMENT), "{text}");

    // A library, but of something else.
    let error = Library::load_from("libm.so.6").unwrap_err();
    assert_eq!(error.tried[0].why, "lacks fi_getinfo");
    let error = Library::load_from("a\0b").unwrap_err();
    assert_eq!(error.tried[0].why, "a path holds no NUL byte");
}

/// Runs [`answers`] in a process of its own; what it says.
fn ask(environment: Option<&Path>, loaded_before: Option<&Path>) -> String {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "answers", "--nocapture"]).env_remove(ENVIRONMENT);
    child.env_remove("LOADED_BEFORE");
    for (name, value) in [(ENVIRONMENT, environment), ("LOADED_BEFORE", loaded_before)] {
        if let Some(value) = value {
            child.env(name, value);
        }
    }
    let said = String::from_utf8(child.output().unwrap().stdout).unwrap();
    said.lines().find_map(|line| line.split_once("ANSWER ")).expect(&said).1.to_owned()
}

#[test]
#[ignore = "the other half of `the_environment_decides_then_what_is_loaded`, run by it in a process of its own"]
fn answers() {
    if let Some(path) = env::var_os("LOADED_BEFORE") {
        Library::load_from(path).unwrap();
    }
    match Library::load() {
        Ok(library) => println!("\nANSWER {}", library.path().display()),
        Err(error) => println!("\nANSWER {error}"),
    }
}

#[test]
fn the_environment_decides_then_what_is_loaded() {
    let libraries = libraries();
    let nowhere = Path::new("/nonexistent/libfabric.so.1");
    for library in &libraries {
        let path = library.path();
        assert_eq!(ask(Some(path), None), path.display().to_string());
        assert_eq!(
            ask(None, Some(path)),
            path.display().to_string(),
            "another copy was loaded beside it"
        );
        // Whom the environment names is not replaced by another, were it loaded already.
        let said = ask(Some(nowhere), Some(path));
        assert!(
            said.starts_with("no libfabric") && said.matches("libfabric.so.1:").count() == 1,
            "{said}"
        );
    }
    if let [one, other, ..] = libraries[..] {
        assert_eq!(ask(Some(one.path()), Some(other.path())), one.path().display().to_string());
    }
}

/// One that has all the names, without versions, and says what it is.
fn stub(folder: &Path, version: u32) -> std::path::PathBuf {
    let (source, library) = (folder.join("stub.c"), folder.join(format!("stub-{version}.so")));
    let text = format!(
        "unsigned fi_version(void) {{ return {version}; }}\n\
         int fi_getinfo, fi_freeinfo, fi_dupinfo, fi_fabric, fi_strerror;\n"
    );
    std::fs::write(&source, text).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    assert!(command.status().unwrap().success());
    library
}

#[test]
fn what_says_that_it_is_too_old_is_refused_whatever_names_it_has() {
    let folder = env::temp_dir().join(format!("immwire-libfabric-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (minor, is_taken) in [(6, false), (8, false), (9, true), (20, true)] {
        let loaded = Library::load_from(stub(&folder, FI_VERSION(1, minor)));
        match loaded {
            Ok(library) => {
                assert!(is_taken);
                assert_eq!(
                    library.version(),
                    Version { major: 1, minor: u16::try_from(minor).unwrap() }
                );
            }
            Err(error) => {
                assert!(!is_taken, "{error}");
                let why = format!("is libfabric 1.{minor}; 1.9 is needed");
                assert_eq!(error.tried[0].why, why);
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
