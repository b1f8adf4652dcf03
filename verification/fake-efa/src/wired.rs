//! Enabled endpoints, between their callers and the [`engine`] behind them: what is posted, and who is told.
//!
//! Callers leave here what they post, and wake the device's thread if it sleeps; completions they find in the queues.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::EventfdFlags;

use crate::config::Config;
use crate::context::Context;
use crate::disorder::{Choice, Disorder};
use crate::engine;
use crate::lock;
use crate::memory::{InUse, Keys, Region, Users};
use crate::packet::Address;
use crate::peers::Peers;
use crate::queue::Queue;
use crate::status::Status;

/// Once in so many posts the queue says that it is full.
const FULL_ONCE_IN: u64 = 32;

/// What an endpoint is, from its `fi_info` and options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// The fabric is `efa-direct`, not `efa`.
    pub direct: bool,
    /// The device that it is on.
    pub nic: u8,
    /// A write with data takes no posted receive.
    pub unsolicited: bool,
    /// `FI_SOURCE`: events say whose they are.
    pub source: bool,
    /// `FI_RMA`.
    pub rma: bool,
    /// `FI_OPT_MAX_RMA_SIZE`.
    pub max_rma: usize,
    /// `FI_OPT_MAX_MSG_SIZE`.
    pub max_message: usize,
}

/// What an operation transfers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Transfer {
    Write { data: Option<u32>, key: u32, address: u64 },
    Send { data: Option<u32> },
}

/// A posted operation.
#[derive(Debug)]
pub(crate) struct Op {
    pub transfer: Transfer,
    pub to: Address,
    /// Where its bytes are; `None` if it has none.
    pub source: Option<(Arc<Region>, u64)>,
    pub len: usize,
    pub context: Context,
    /// An end that is certain already.
    pub doomed: Option<Status>,
    /// What it keeps: its place in the queue, and that its destination and source are in use.
    pub slot: InUse,
    pub uses: (InUse, Option<InUse>),
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct Receive {
    pub region: Option<Arc<Region>>,
    pub address: u64,
    pub len: usize,
    pub context: Context,
    pub slot: InUse,
    pub used: Option<InUse>,
}

/// What callers have left for the device.
#[derive(Debug, Default)]
pub(crate) struct Posted {
    pub ops: Vec<Op>,
    pub receives: VecDeque<Receive>,
    /// Calls that post, counted for `Choice::Full`.
    calls: u64,
    pub close: bool,
    pub asleep: bool,
}

/// An enabled endpoint, as its callers see it.
#[derive(Debug)]
pub(crate) struct Wired {
    /// The process's how many-th it is.
    pub number: u64,
    pub address: Address,
    pub settings: Settings,
    pub keys: Arc<Keys>,
    pub peers: Arc<Peers>,
    pub tx: Arc<Queue>,
    pub rx: Arc<Queue>,
    pub tx_slots: Users,
    pub rx_slots: Users,
    pub disorder: Disorder,
    pub late: Duration,
    pub late_writes: Duration,
    pub dead: Duration,
    pub silent: Duration,
    pub early_ack: bool,
    breaks: Option<PathBuf>,
    broken: AtomicBool,
    pub wake: OwnedFd,
    pub posted: Mutex<Posted>,
}

impl Wired {
    /// Returns whether the queue says that it is full this time, for no reason that a caller could know.
    pub(crate) fn is_full_at_random(&self) -> bool {
        let mut posted = lock(&self.posted);
        posted.calls += 1;
        self.disorder.once_in(FULL_ONCE_IN, Choice::Full, posted.calls)
    }

    /// Returns whether it is in error.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Returns how what is posted now ends, if it is in error; it may be this by which that begins.
    pub(crate) fn fault(&self) -> Option<Status> {
        if self.is_broken() {
            return Some(Status::Flushed);
        }
        let said = std::fs::read_to_string(self.breaks.as_ref()?).ok()?;
        let begins = said.trim().parse() == Ok(self.number);
        begins.then(|| {
            self.broken.store(true, Ordering::Release);
            Status::QueuePair
        })
    }

    /// Hands an operation to the device.
    pub(crate) fn post(&self, op: Op) {
        let mut posted = lock(&self.posted);
        posted.ops.push(op);
        self.wake(&mut posted);
    }

    /// Hands a receive to the device.
    pub(crate) fn post_receive(&self, receive: Receive) {
        let mut posted = lock(&self.posted);
        posted.receives.push_back(receive);
        self.wake(&mut posted);
    }

    fn wake(&self, posted: &mut Posted) {
        if std::mem::take(&mut posted.asleep) {
            signal(&self.wake);
        }
    }

    /// Tells the thread to end. Once it has, nothing happens any more: completions that are due are dropped.
    pub(crate) fn close(&self) {
        let mut posted = lock(&self.posted);
        posted.close = true;
        self.wake(&mut posted);
    }

    /// Drops some of the completions that were not read; to be called after the thread has ended.
    pub(crate) fn discard(&self) -> u64 {
        let choice = |place| self.disorder.once_in(2, Choice::Discard, place);
        [&self.tx, &self.rx].map(|queue| queue.discard(self.number, choice)).iter().sum()
    }
}

/// Makes a file descriptor readable.
pub(crate) fn signal(fd: &OwnedFd) {
    // It can fail only by being readable already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Makes it unreadable.
pub(crate) fn drain(fd: &OwnedFd) {
    // It can fail only by being unreadable already.
    let _ = rustix::io::read(fd, &mut [0_u8; 8]);
}

/// Returns a file descriptor for [`signal`] and [`drain`].
pub(crate) fn event_fd() -> std::io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// What an endpoint stands on.
pub(crate) struct Parts {
    pub settings: Settings,
    pub keys: Arc<Keys>,
    pub peers: Arc<Peers>,
    pub tx: Arc<Queue>,
    pub rx: Arc<Queue>,
}

/// Creates the queue pair and starts its thread.
pub(crate) fn start(
    config: &Config,
    parts: Parts,
) -> std::io::Result<(Arc<Wired>, JoinHandle<()>)> {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let (address, socket) = queue_pair(parts.settings.nic, number)?;
    let wired = Arc::new(Wired {
        number,
        address,
        settings: parts.settings,
        keys: parts.keys,
        peers: parts.peers,
        tx: parts.tx,
        rx: parts.rx,
        tx_slots: Users::default(),
        rx_slots: Users::default(),
        disorder: Disorder::new(config.seed, number, config.delay),
        late: config.late,
        late_writes: config.late_writes,
        dead: config.dead,
        silent: config.silent,
        early_ack: config.early_ack,
        breaks: config.breaks.clone(),
        broken: AtomicBool::new(false),
        wake: event_fd()?,
        posted: Mutex::default(),
    });
    let thread = engine::spawn(wired.clone(), socket)?;
    Ok((wired, thread))
}

/// Finds a queue pair number that nobody on this host has, other than the last one of this process.
fn queue_pair(nic: u8, number: u64) -> std::io::Result<(Address, UnixDatagram)> {
    static QPNS: AtomicU16 = AtomicU16::new(0);
    let clock = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| u64::from(time.subsec_nanos()));
    let chance =
        Disorder::new(clock ^ (u64::from(std::process::id()) << 32), number, Duration::ZERO);
    if number == 0 {
        let first = chance.word(Choice::Name, 0, 0).to_le_bytes();
        QPNS.store(u16::from_le_bytes([first[0], first[1]]), Ordering::Relaxed);
    }
    let qkey = (chance.word(Choice::Name, 1, 0) >> 1) | 1;
    for _ in 0..=u16::MAX {
        let qpn = QPNS.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let address = Address { gid: Address::gid(nic), qpn, qkey };
        match UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(address.socket_name())?) {
            Ok(socket) if qpn != 0 => {
                socket.set_nonblocking(true)?;
                return Ok((address, socket));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::AddrInUse.into())
}
