//! An engine with whatever makes it move: its own thread, or this one.
//!
//! Every wait here has a deadline and ends early on Ctrl-C, so that the rest of the program need not
//! think of either.

use crate::signals;
use crate::transport::{Carrier, TransportError};
use clap::ValueEnum;
use immwire::core::wire::Wire;
use immwire::{
    AddPeerError, BuildError, CountError, CounterTaken, Driver, End, ImmCounter, Message, MrDesc,
    NetAddr, PeerError, PeerId, Place, RecvError, Region, RegisterError, SingleWrite, Staging,
    SubmitError, Transfer, TransferEngine, TransferError, Transport,
};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// How long a wait goes on before it looks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(100);

/// Why something the engine was asked for did not happen. The engine's own words, with those of
/// waiting added.
#[derive(Debug, thiserror::Error)]
pub enum MotorError {
    /// The flags make no transport.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The table of devices cannot be read.
    #[error("{0}")]
    Pairing(String),
    /// The engine could not start.
    #[error("the engine cannot start: {0}")]
    Build(#[from] BuildError),
    /// Memory could not be had.
    #[error("no memory from the engine: {0}")]
    Memory(#[from] RegisterError),
    /// A counter could not be had.
    #[error(transparent)]
    Counter(#[from] CounterTaken),
    /// A peer could not be added.
    #[error(transparent)]
    AddPeer(#[from] AddPeerError),
    /// A peer is not there.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// A request was refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// A transfer failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A transfer did not end in time; it was cancelled.
    #[error("a transfer did not end within {0:?}")]
    Stuck(Duration),
    /// A count was not reached.
    #[error(transparent)]
    Count(#[from] CountError),
    /// No message came.
    #[error(transparent)]
    Recv(#[from] RecvError),
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// Who makes the engine move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The caller polls: no thread, lowest latency, a core of its own while it runs.
    Polled,
    /// The engine's own thread, which sleeps when idle.
    Thread,
}

/// An engine that moves.
#[derive(Debug)]
pub struct Motor {
    engine: TransferEngine,
    driver: Option<Driver>,
}

impl Motor {
    /// An engine with `nics` NICs on a transport.
    ///
    /// # Errors
    ///
    /// [`MotorError::Build`].
    pub fn new(transport: &Transport, nics: u8, mode: Mode) -> Result<Self, MotorError> {
        Self::on(&Carrier::of(transport.clone()), nics, mode)
    }

    /// The same, with the GPUs of `carrier`.
    ///
    /// # Errors
    ///
    /// [`MotorError::Build`].
    pub fn on(carrier: &Carrier, nics: u8, mode: Mode) -> Result<Self, MotorError> {
        let mut builder = TransferEngine::builder()
            .transport(carrier.transport.clone())
            .shm_on_host(carrier.shm_on_host)
            .nics(nics);
        if let Some(pair) = &carrier.gpus {
            builder = builder.gpus(pair.ordinals());
            builder = if let Some(sms) = pair.sms { builder.sms(sms) } else { builder };
            builder = builder.pairing(carrier.pairing.read().map_err(MotorError::Pairing)?);
        }
        if let Some(bytes) = carrier.staging {
            builder = builder.staging(Staging { bytes });
        }
        Ok(match mode {
            Mode::Thread => Self { engine: builder.build()?, driver: None },
            Mode::Polled => {
                let (engine, driver) = builder.build_polled()?;
                Self { engine, driver: Some(driver) }
            }
        })
    }

    /// Zeroed memory, where it is to be.
    ///
    /// # Errors
    ///
    /// [`MotorError::Memory`].
    pub fn alloc(&self, place: Place, bytes: u64) -> Result<Region, MotorError> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(match place {
            Place::Host => self.engine.alloc(bytes)?,
            Place::Gpu(ordinal) => self.engine.alloc_gpu(ordinal, bytes)?,
        })
    }

    /// The engine's handle, to submit by. Its own waits are for engines with a thread.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// Submits a write; if polled, from the thread that polls, which posts it at once.
    ///
    /// # Errors
    ///
    /// [`SubmitError`].
    #[inline]
    pub fn write(&mut self, write: &SingleWrite<'_>) -> Result<Transfer, SubmitError> {
        match &mut self.driver {
            Some(driver) => driver.submit_single_write(write),
            None => self.engine.submit_single_write(write),
        }
    }

    /// Polls until `done` says something; `None` if that takes longer than `timeout`.
    ///
    /// # Errors
    ///
    /// [`MotorError::Interrupted`].
    fn until<R>(
        &mut self,
        timeout: Duration,
        mut step: impl FnMut(&TransferEngine, Option<&mut Driver>, Duration) -> Option<R>,
    ) -> Result<Option<R>, MotorError> {
        // The usual case, without a look at the clock.
        if let Some(result) = step(&self.engine, self.driver.as_mut(), SLICE.min(timeout)) {
            return Ok(Some(result));
        }
        let start = Instant::now();
        loop {
            if signals::interrupted() {
                return Err(MotorError::Interrupted);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            if let Some(result) = step(&self.engine, self.driver.as_mut(), SLICE.min(left)) {
                return Ok(Some(result));
            }
        }
    }

    /// Waits for a transfer's end. One that is late is cancelled, and its end awaited once more.
    ///
    /// # Errors
    ///
    /// [`MotorError`]: it failed, was late, or Ctrl-C.
    #[inline]
    pub fn finish(&mut self, transfer: &Transfer, timeout: Duration) -> Result<(), MotorError> {
        if transfer.poll_end() == Some(End::Done) {
            return Ok(());
        }
        let step = |_: &TransferEngine, driver: Option<&mut Driver>, slice| match driver {
            Some(driver) => driver.wait(transfer, slice).ok(),
            None => transfer.wait(slice).ok(),
        };
        match self.until(timeout, step) {
            Ok(Some(end)) => Ok(end.ok()?),
            late => {
                transfer.cancel();
                let _ = step(&self.engine, self.driver.as_mut(), Duration::from_secs(5));
                late?;
                Err(MotorError::Stuck(timeout))
            }
        }
    }

    /// Waits until `writes` have arrived at `counter`, and consumes them.
    ///
    /// # Errors
    ///
    /// [`MotorError`]: too late, or Ctrl-C.
    #[inline]
    pub fn count(
        &mut self,
        counter: &ImmCounter,
        writes: u64,
        timeout: Duration,
    ) -> Result<(), MotorError> {
        let mut late = None;
        let counted = self.until(timeout, |_, driver, slice| {
            let waited = match driver {
                Some(driver) => driver.wait_count(counter, writes, slice),
                None => counter.wait(writes, slice),
            };
            match waited {
                Err(error @ CountError::Timeout { .. }) => {
                    late = Some(error);
                    None
                }
                ended => Some(ended),
            }
        })?;
        match (counted, late) {
            (Some(ended), _) => Ok(ended?),
            (None, Some(late)) => Err(late.into()),
            (None, None) => Err(RecvError::Timeout { after: timeout }.into()),
        }
    }

    /// Waits for a message; `None` if none came in time.
    ///
    /// # Errors
    ///
    /// [`MotorError`]: the engine has stopped, or Ctrl-C.
    pub fn message(&mut self, timeout: Duration) -> Result<Option<Message>, MotorError> {
        let got = self.until(timeout, |engine, driver, slice| {
            let got = match driver {
                Some(driver) => driver.recv(slice),
                None => engine.recv(slice),
            };
            match got {
                Err(RecvError::Timeout { .. }) => None,
                ended => Some(ended),
            }
        })?;
        Ok(got.transpose()?)
    }

    /// Sends a message and waits until it lies in the peer's mailbox.
    ///
    /// # Errors
    ///
    /// [`MotorError`].
    pub fn send(
        &mut self,
        peer: PeerId,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<(), MotorError> {
        let transfer = self.engine.submit_send(peer, bytes)?;
        self.finish(&transfer, timeout)
    }

    /// Connects to `address`.
    ///
    /// # Errors
    ///
    /// [`MotorError`]: nobody is there, we are not let in, or Ctrl-C.
    pub fn connect(&mut self, address: &NetAddr, timeout: Duration) -> Result<PeerId, MotorError> {
        let peer = match &mut self.driver {
            Some(driver) => driver.add_peer(address)?,
            None => self.engine.add_peer(address)?,
        };
        let up = self.until(timeout, |engine, driver, slice| {
            let waited = match driver {
                Some(driver) => driver.wait_peer(peer, slice),
                None => engine.wait_peer(peer, slice),
            };
            match waited {
                Err(PeerError::Timeout { .. }) => None,
                ended => Some(ended),
            }
        })?;
        up.unwrap_or(Err(PeerError::Timeout { peer, after: timeout }))?;
        Ok(peer)
    }

    /// One step, if it is ours to do. For work of seconds between waits: peers take an engine for gone that nobody
    /// polls.
    pub fn step(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.poll();
        }
    }

    /// Lets time pass: polls if that is ours to do, sleeps otherwise. For servers with nothing to do.
    pub fn rest(&mut self, limit: Duration) {
        match &mut self.driver {
            Some(driver) => driver.sleep(limit),
            None => std::thread::sleep(limit),
        }
    }

    /// Whether this thread is the one that polls.
    #[must_use]
    pub fn is_polled(&self) -> bool {
        self.driver.is_some()
    }
}

/// A region's descriptor as text for a message.
#[must_use]
pub fn desc_text(desc: &MrDesc) -> String {
    let mut bytes = [0; MrDesc::ENCODED_MAX];
    // PROOF: the buffer has the documented size, and a descriptor from an engine is consistent.
    let len = desc.encode(&mut bytes).unwrap_or(0);
    crate::push::message::hex(bytes.get(..len).unwrap_or_default())
}

/// A descriptor from [`desc_text`]; `None` if it is not one.
#[must_use]
pub fn desc_of(text: &str) -> Option<MrDesc> {
    MrDesc::decode(&crate::push::message::unhex(text)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use immwire::SingleWrite;

    /// Nobody is kept from running for so long.
    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn both_modes_connect_send_write_and_count() {
        for mode in [Mode::Polled, Mode::Thread] {
            let mut here = Motor::new(&Transport::Shm, 2, mode).unwrap();
            let mut there = Motor::new(&Transport::Shm, 1, Mode::Thread).unwrap();
            let peer = here.connect(there.engine().address(), PATIENCE).unwrap();
            here.send(peer, b"hello", PATIENCE).unwrap();
            assert_eq!(there.message(PATIENCE).unwrap().unwrap().bytes, b"hello");
            let (src, dst) = (here.engine().alloc(64).unwrap(), there.engine().alloc(64).unwrap());
            let counter = there.engine().counter().unwrap();
            src.write(0, b"bytes").unwrap();
            let dst_desc = desc_of(&desc_text(&dst.desc())).unwrap();
            assert_eq!(dst_desc, dst.desc());
            let write = SingleWrite {
                peer,
                src: &src,
                src_offset: 0,
                dst: &dst_desc,
                dst_offset: 8,
                len: 5,
                imm: Some(counter.tag()),
            };
            let transfer = here.engine().submit_single_write(&write).unwrap();
            here.finish(&transfer, PATIENCE).unwrap();
            there.count(&counter, 1, PATIENCE).unwrap();
            let mut got = [0; 5];
            dst.read(8, &mut got).unwrap();
            assert_eq!(&got, b"bytes");
            let late = there.count(&counter, 1, Duration::from_millis(10));
            assert!(matches!(late, Err(MotorError::Count(CountError::Timeout { .. }))));
            assert!(here.message(Duration::from_millis(10)).unwrap().is_none());
        }
    }

    #[test]
    fn text_that_is_no_descriptor_is_refused() {
        for text in ["", "00", "zz", "4957"] {
            assert_eq!(desc_of(text), None);
        }
    }
}
