//! Peer processes that a benchmark starts for itself: this program again, under a hidden name.
//!
//! # Invariants
//!
//! A peer process never outlives its starter for long: it ends when its input ends, which also happens
//! when the starter is killed; a starter that is alive waits for it, and kills it if it dawdles.

use crate::motor::Mode;
use crate::transport::Carrier;
use immwire::NetAddr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The hidden subcommand.
pub const PEER_COMMAND: &str = "__peer";

const START: Duration = Duration::from_secs(10);
const END: Duration = Duration::from_secs(3);

/// Why a peer process is not there.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It could not be started.
    #[error("no peer process could be started: {0}")]
    Start(#[from] std::io::Error),
    /// It said nothing, or something else.
    #[error("the peer process did not say its address, but {0:?}")]
    NoAddress(String),
}

/// A running peer.
#[derive(Debug)]
pub struct PeerProcess {
    child: Child,
    address: NetAddr,
}

impl PeerProcess {
    /// Starts a peer with `nics` NICs on the same as this process, and waits for its address.
    ///
    /// # Errors
    ///
    /// [`ProcessError`]; nothing is left running.
    pub fn start(carrier: &Carrier, nics: u8, mode: Mode) -> Result<Self, ProcessError> {
        let mode = match mode {
            Mode::Polled => "polled",
            Mode::Thread => "thread",
        };
        let child = crate::again::command()?
            .args([PEER_COMMAND, "--mode", mode, "--nics", &nics.to_string()])
            .args(carrier.flags())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the starter, who ends the peer in order.
            .process_group(0)
            .spawn()?;
        let mut started = Starting(Some(child));
        let out = started.0.as_mut().and_then(|child| child.stdout.take());
        let (give, take) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            if let Some(out) = out {
                let _ = BufReader::new(out).read_line(&mut line);
            }
            let _ = give.send(line);
        });
        let line = take.recv_timeout(START).unwrap_or_default();
        let address = line.trim().parse().map_err(|_| ProcessError::NoAddress(line))?;
        match started.0.take() {
            Some(child) => Ok(Self { child, address }),
            None => Err(ProcessError::NoAddress(String::new())),
        }
    }

    /// Where it is reached.
    #[must_use]
    pub fn address(&self) -> &NetAddr {
        &self.address
    }
}

/// Kills what is dropped before it is a peer.
struct Starting(Option<Child>);

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let start = Instant::now();
        while start.elapsed() < END {
            match self.child.try_wait() {
                Ok(Some(_)) => return,
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Err(_) => break,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the peer process: ends it when the input ends.
pub fn end_with_input() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}
