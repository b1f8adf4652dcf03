//! Where a program runs: engines by number, one step at a time, and faults where there are any.

use std::time::{Duration, Instant};

use immwire_core::id::PeerId;

use crate::{BuildError, Builder, Driver, TransferEngine};

/// Something that goes wrong on purpose, or is put right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A NIC of an engine is lost, or is back.
    Nic {
        /// The engine.
        engine: usize,
        /// Its NIC.
        nic: u8,
        /// Lost.
        lost: bool,
    },
    /// A path from an engine to a peer is cut, or mended.
    Path {
        /// The engine.
        engine: usize,
        /// The other engine.
        to: usize,
        /// The peer that it is to the first.
        peer: PeerId,
        /// NIC here.
        nic: u8,
        /// NIC there.
        remote_nic: u8,
        /// Cut.
        cut: bool,
    },
    /// Registrations fail now and then, or do not.
    Registration {
        /// They fail.
        fails: bool,
    },
}

/// Engines under test and what is between them.
pub trait World {
    /// Starts an engine of `nics` NICs as number `at`, where there is none.
    ///
    /// # Errors
    ///
    /// [`BuildError`].
    fn start(
        &mut self,
        at: usize,
        nics: u8,
        builder: Builder,
    ) -> Result<TransferEngine, BuildError>;

    /// What polls the engine.
    fn driver(&mut self, at: usize) -> Option<&mut Driver>;

    /// The engine is gone without a word; its handles may live on.
    fn kill(&mut self, at: usize);

    /// The engine ends in order: everything of it has ended when this returns.
    fn stop(&mut self, at: usize);

    /// Lets the next thing happen, if it happens before `until`; otherwise that is the time, and the
    /// answer is `false`.
    fn step(&mut self, until: Duration) -> bool;

    /// The time since the world began.
    fn now(&self) -> Duration;

    /// Has the fault happen; `false` where there is no such fault.
    fn fault(&mut self, fault: Fault) -> bool;

    /// Whether what is on a path that breaks goes over another: then a connection outlasts the loss of a NIC.
    fn fails_over(&self) -> bool {
        false
    }

    /// Whether times are exact, and so bounds on them can be held to.
    fn is_virtual(&self) -> bool;

    /// What an engine has done that its provider relies on it not to do.
    fn breach(&self) -> Option<String> {
        None
    }

    /// What happened between the engines since the last call, a line each; empty where nobody knows.
    fn trace(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// Engines over shared memory, all polled by one thread. The only fault is the end of an engine; time is
/// the machine's.
#[derive(Debug)]
pub struct ShmWorld {
    drivers: Vec<Option<Driver>>,
    began: Instant,
}

impl Default for ShmWorld {
    fn default() -> Self {
        Self { drivers: Vec::new(), began: Instant::now() }
    }
}

impl World for ShmWorld {
    fn start(
        &mut self,
        at: usize,
        nics: u8,
        builder: Builder,
    ) -> Result<TransferEngine, BuildError> {
        let (engine, driver) = builder.nics(nics).build_polled()?;
        if self.drivers.len() <= at {
            self.drivers.resize_with(at + 1, || None);
        }
        if let Some(place) = self.drivers.get_mut(at) {
            *place = Some(driver);
        }
        Ok(engine)
    }

    fn driver(&mut self, at: usize) -> Option<&mut Driver> {
        self.drivers.get_mut(at)?.as_mut()
    }

    fn kill(&mut self, at: usize) {
        self.stop(at);
    }

    fn stop(&mut self, at: usize) {
        if let Some(driver) = self.drivers.get_mut(at) {
            drop(driver.take());
        }
    }

    fn step(&mut self, until: Duration) -> bool {
        if self.now() >= until {
            return false;
        }
        for driver in self.drivers.iter_mut().flatten() {
            driver.poll();
        }
        true
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn fault(&mut self, _: Fault) -> bool {
        false
    }

    fn is_virtual(&self) -> bool {
        false
    }
}
