//! A network of two hosts: namespaces, and what joins them.
//!
//! A host is a process in a network namespace of its own. Nothing here has a name outside of these processes, so
//! that the kernel removes all of it with the last of them, however they end.
//!
//! Two ways to join them: [`Veth`], the kernel's pair of Ethernet devices, and [`Wire`], which carries packets
//! between two TUN devices itself and is as slow and lossy as it is told to be. `tc netem` would do the latter,
//! but is missing from many kernels; and here a seed repeats which packets are lost.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// What both hosts call their network interface.
pub const NIC: &str = "im0";

/// What a test cannot do without is missing.
#[derive(Debug)]
pub struct Missing(pub String);

fn missing(what: &str) -> impl FnOnce(std::io::Error) -> Missing {
    move |error| Missing(format!("{what}: {error}"))
}

/// Moves this process, which has one thread, to a network of its own, with nothing in it but loopback.
pub fn leave() -> Result<(), Missing> {
    // SAFETY: files and memory stay shared as they were; only the network is another one.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(|errno| missing("a network namespace (needs root)")(errno.into()))?;
    ip("link set lo up")
}

/// Runs `ip`, of iproute2, here or in the network of another process, by `nsenter` of util-linux; returns what
/// it says.
fn said(at: Option<u32>, words: &str) -> Result<String, Missing> {
    let mut command = match at {
        None => Command::new("ip"),
        Some(pid) => {
            let mut command = Command::new("nsenter");
            command.args(["-t", &pid.to_string(), "-n", "ip"]);
            command
        }
    };
    let output = command.args(words.split(' ')).output();
    let output =
        output.map_err(missing("`ip` and `nsenter` (apt-get install iproute2 util-linux)"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Missing(format!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// Runs `ip` here.
pub fn ip(words: &str) -> Result<(), Missing> {
    said(None, words).map(|_| ())
}

/// Gives both ends their addresses, and waits until they are up.
fn number(other: u32) -> Result<(), Missing> {
    for (at, last) in [(None, 1), (Some(other), 2)] {
        said(at, &format!("addr add 10.77.0.{last}/24 dev {NIC}"))?;
        said(at, &format!("link set {NIC} up"))?;
    }
    let start = Instant::now();
    for at in [None, Some(other)] {
        // A TUN device never says so.
        let is_up = |state: String| state.contains("state UP") || state.contains("state UNKNOWN");
        while !is_up(said(at, &format!("-o link show dev {NIC}"))?) {
            assert!(start.elapsed() < Duration::from_secs(10), "{NIC} does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// Joins this network with that of another process by a pair of Ethernet devices.
pub fn veth(other: u32) -> Result<(), Missing> {
    ip(&format!("link add name {NIC} type veth peer name {NIC} netns {other}"))?;
    number(other)
}

/// Takes such a pair away; the end of the other host's network may have done so already.
pub fn unlink() -> Result<(), Missing> {
    let start = Instant::now();
    while said(None, "-o link show")?.contains(NIC) {
        assert!(start.elapsed() < Duration::from_secs(10), "{NIC} does not go");
        let _ = ip(&format!("link del {NIC}"));
    }
    Ok(())
}

/// A TUN device in this thread's network.
fn tun() -> Result<OwnedFd, Missing> {
    let file = File::options().read(true).write(true).open("/dev/net/tun");
    let file = file.map_err(missing("/dev/net/tun"))?;
    // SAFETY: all zero is a request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(NIC.bytes()) {
        *to = libc::c_char::try_from(from).expect("ASCII");
    }
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_TUN | libc::IFF_NO_PI).expect("16 bits");
    // SAFETY: a TUN device's file, and a request that is read and written during the call.
    let code = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if code != 0 {
        return Err(missing("TUNSETIFF")(std::io::Error::last_os_error()));
    }
    rustix::io::ioctl_fionbio(&file, true).map_err(|errno| missing("FIONBIO")(errno.into()))?;
    Ok(file.into())
}

/// How bad the wire is.
#[derive(Debug, Default)]
struct Weather {
    is_down: AtomicBool,
    delay_us: AtomicU64,
    /// Of a thousand packets.
    lost: AtomicU64,
    hurried: AtomicU64,
}

/// A wire between two hosts. It is gone when dropped.
pub struct Wire {
    weather: Arc<Weather>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    /// Joins this network with that of another process.
    pub fn new(other: u32, seed: u64) -> Result<Self, Missing> {
        let here = tun()?;
        // A thread can be in another network than its process.
        let there = std::thread::spawn(move || {
            let net = File::open(format!("/proc/{other}/ns/net")).map_err(missing("/proc"))?;
            move_into_link_name_space(net.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|errno| missing("setns")(errno.into()))?;
            tun()
        });
        let there = there.join().expect("no panic")?;
        number(other)?;
        let (weather, stop) = (Arc::new(Weather::default()), Arc::new(AtomicBool::new(false)));
        let (seen, stopping) = (Arc::clone(&weather), Arc::clone(&stop));
        let thread = std::thread::spawn(move || carry([here, there], &seen, &stopping, seed));
        Ok(Self { weather, stop, thread: Some(thread) })
    }

    /// Each packet takes `delay`; of a thousand, so many are lost, and so many overtake the others.
    pub fn be_bad(&self, delay: Duration, lost: u64, hurried: u64) {
        let micros = u64::try_from(delay.as_micros()).expect("short");
        self.weather.delay_us.store(micros, Ordering::Relaxed);
        self.weather.lost.store(lost, Ordering::Relaxed);
        self.weather.hurried.store(hurried, Ordering::Relaxed);
    }

    /// Nothing gets through, or everything does again; nobody is told.
    pub fn cut(&self, is_down: bool) {
        self.weather.is_down.store(is_down, Ordering::Relaxed);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry(ends: [OwnedFd; 2], weather: &Weather, stop: &AtomicBool, seed: u64) {
    let mut files = ends.map(File::from);
    let mut state = seed | 1;
    let mut chance = |of_thousand: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) % 1000 < of_thousand
    };
    // By when they are due, and in which order they came.
    let mut queue: BTreeMap<(Instant, u64), (usize, Vec<u8>)> = BTreeMap::new();
    let (mut serial, mut packet) = (0, vec![0; 64 << 10]);
    while !stop.load(Ordering::Relaxed) {
        #[expect(clippy::needless_range_loop, reason = "the index is also who sent it")]
        for from in 0..2 {
            while let Ok(len) = files[from].read(&mut packet) {
                let down = weather.is_down.load(Ordering::Relaxed);
                if down || chance(weather.lost.load(Ordering::Relaxed)) {
                    continue;
                }
                let hurried = chance(weather.hurried.load(Ordering::Relaxed));
                let delay = if hurried { 0 } else { weather.delay_us.load(Ordering::Relaxed) };
                serial += 1;
                let due = Instant::now() + Duration::from_micros(delay);
                queue.insert((due, serial), (1 - from, packet[..len].to_vec()));
            }
        }
        let mut nap = Duration::from_millis(5);
        while let Some(entry) = queue.first_entry() {
            let wait = entry.key().0.saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                nap = nap.min(wait);
                break;
            }
            let (to, bytes) = entry.remove();
            // A host that is gone takes nothing.
            let _ = files[to].write(&bytes);
        }
        let [one, two] = &files;
        let mut fds = [PollFd::new(one, PollFlags::IN), PollFd::new(two, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(nap.subsec_nanos()) };
        let _ = poll(&mut fds, Some(&timeout));
        // An end whose host is gone is ready for ever.
        if fds.iter().any(|fd| fd.revents().intersects(PollFlags::ERR | PollFlags::HUP)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Keeps the network of a process after its end.
pub fn keep(pid: u32) -> File {
    File::open(format!("/proc/{pid}/ns/net")).expect("procfs")
}
