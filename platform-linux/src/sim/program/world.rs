//! Where a program runs: engines by number, one step at a time, and faults where there are any.

use std::fmt;
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
    /// What engines are built from, but for what the program decides.
    fn builder(&self) -> Builder {
        TransferEngine::builder()
    }

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

    /// Whether a write that its target does not allow fails alone. If not, none is tried.
    fn refuses_softly(&self) -> bool {
        true
    }

    /// Whether nothing of a write that was cut off lands after its end. If not, it may until its target is closed.
    fn flushes_at_the_receiver(&self) -> bool {
        true
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

/// Engines on whatever this machine has, all polled by one thread. The only fault is the end of an engine; time
/// is the machine's.
pub struct MachineWorld {
    builder: Box<dyn Fn() -> Builder>,
    drivers: Vec<Option<Driver>>,
    began: Instant,
    manners: Manners,
}

/// What is to be expected of a [`MachineWorld`], beyond the contract: see [`World`].
#[derive(Debug, Clone, Copy)]
pub struct Manners {
    /// [`World::refuses_softly`].
    pub refuses_softly: bool,
    /// [`World::flushes_at_the_receiver`].
    pub flushes_at_the_receiver: bool,
}

impl MachineWorld {
    /// One whose engines are built from what `builder` returns.
    pub fn new(builder: impl Fn() -> Builder + 'static, manners: Manners) -> Self {
        let builder = Box::new(builder);
        Self { builder, drivers: Vec::new(), began: Instant::now(), manners }
    }
}

/// Over shared memory.
impl Default for MachineWorld {
    fn default() -> Self {
        let manners = Manners { refuses_softly: true, flushes_at_the_receiver: true };
        Self::new(TransferEngine::builder, manners)
    }
}

impl fmt::Debug for MachineWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineWorld").field("drivers", &self.drivers).finish_non_exhaustive()
    }
}

impl World for MachineWorld {
    fn builder(&self) -> Builder {
        (self.builder)()
    }

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

    fn refuses_softly(&self) -> bool {
        self.manners.refuses_softly
    }

    fn flushes_at_the_receiver(&self) -> bool {
        self.manners.flushes_at_the_receiver
    }

    fn is_virtual(&self) -> bool {
        false
    }
}
