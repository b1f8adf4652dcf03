//! Engines on a simulated fabric that is as unkind as a provider may be.

use std::time::Duration;

use immwire_core::id::PeerId;

use super::operation::Numbers;
use super::world::{Fault, World};
use crate::provider::Path;
use crate::sim::{Death, Fabric, FabricConfig, NicModel, Order, Sabotage};
use crate::{BuildError, Builder, Driver, TransferEngine};

/// Events that are kept for a trace, between two lines of the program's own.
const TRACED: usize = 4096;

/// A world on a [`Fabric`]. The seed decides the NICs, whether they take runs of pages, how late and in what order messages come, and
/// what engines notice.
#[derive(Debug)]
pub struct FabricWorld {
    fabric: Fabric,
    numbers: Numbers,
    /// Without order there are no receipts: a broken path is the end of the connection.
    order: Order,
    /// Of every NIC here.
    pages_per_piece: u16,
    drivers: Vec<Driver>,
    /// For each driver: the number of its engine here, and on the fabric.
    names: Vec<(usize, u32)>,
    /// Somebody was given a driver: its engine may have something to do.
    touched: bool,
}

impl FabricWorld {
    /// An empty world. A `traced` one keeps what happens on the fabric.
    #[must_use]
    pub fn new(seed: u64, traced: bool) -> Self {
        let mut numbers = Numbers::new(seed ^ 0x6661_6272_6963);
        let micros = |numbers: &mut Numbers, most| Duration::from_micros(numbers.below(most));
        let config = FabricConfig {
            jitter: micros(&mut numbers, 10),
            late_one_in: [0, 5, 20][numbers.index(3)],
            late: micros(&mut numbers, 200),
            parts: 1 + u8::try_from(numbers.below(6)).unwrap_or(0),
            queue_full_one_in: [0, 3, 10][numbers.index(3)],
            connect: micros(&mut numbers, 100),
            register: micros(&mut numbers, 5),
            ..FabricConfig::calm()
        };
        let fabric = Fabric::new(seed, config);
        if traced {
            fabric.keep_trace(TRACED);
        }
        let order = if numbers.percent(60) { Order::Fifo } else { Order::Any };
        let pages_per_piece = [1, 2, 7, 255][numbers.index(4)];
        let (drivers, names, touched) = (Vec::new(), Vec::new(), false);
        Self { fabric, numbers, order, pages_per_piece, drivers, names, touched }
    }

    /// Has the fabric break its own contract, one time in so many that it could.
    #[doc(hidden)]
    #[must_use]
    pub fn sabotaged(self, sabotage: Sabotage, one_in: u32) -> Self {
        self.fabric.sabotage(Some((sabotage, one_in)));
        self
    }

    /// NICs small enough for writes of some hundred bytes to be cut.
    fn nic(&mut self) -> NicModel {
        let numbers = &mut self.numbers;
        let speed = 10 * (1 + u32::try_from(numbers.below(4)).unwrap_or(0));
        NicModel {
            name: "small",
            speed_gbps: speed,
            goodput_mbps: speed * 1000,
            latency: Duration::from_nanos(500 + numbers.below(3000)),
            per_message: Duration::from_nanos(20),
            post: Duration::from_nanos(40),
            poll: Duration::from_nanos(20),
            queue_depth: [2, 4, 8, 16, 64][numbers.index(5)],
            max_message_bytes: [320, 512, 4096][numbers.index(3)],
            min_piece_bytes: [1, 64, 256][numbers.index(3)],
            pages_per_piece: self.pages_per_piece,
            together: [1, 2, 3, 16][numbers.index(4)],
            order: self.order,
            detect: Duration::from_micros(20),
            reconnect: Duration::from_micros(40),
        }
    }

    fn place(&self, at: usize) -> Option<usize> {
        self.names.iter().position(|name| name.0 == at)
    }

    fn number(&self, at: usize) -> Option<u32> {
        self.names.iter().find(|name| name.0 == at).map(|name| name.1)
    }

    fn forget(&mut self, at: usize) {
        if let Some(place) = self.place(at) {
            self.names.remove(place);
            drop(self.drivers.remove(place));
        }
    }

    fn cut(&self, engine: usize, peer: PeerId, path: Path, cut: bool) -> bool {
        let Some(engine) = self.number(engine) else { return false };
        if cut {
            self.fabric.cut_path(engine, peer, path);
        } else {
            self.fabric.mend_path(engine, peer, path);
        }
        true
    }
}

impl World for FabricWorld {
    fn start(
        &mut self,
        at: usize,
        nics: u8,
        builder: Builder,
    ) -> Result<TransferEngine, BuildError> {
        self.forget(at);
        let nics: Vec<NicModel> = (0..nics).map(|_| self.nic()).collect();
        let (engine, driver) = self.fabric.engine(builder, &nics)?;
        let number = self.fabric.number_of(engine.address()).unwrap_or(u32::MAX);
        self.names.push((at, number));
        self.drivers.push(driver);
        Ok(engine)
    }

    fn driver(&mut self, at: usize) -> Option<&mut Driver> {
        self.touched = true;
        let place = self.place(at)?;
        self.drivers.get_mut(place)
    }

    fn kill(&mut self, at: usize) {
        let death = if self.numbers.percent(50) {
            Death::Silent
        } else {
            Death::NoticedWithin(Duration::from_micros(100))
        };
        if let Some(number) = self.number(at) {
            self.fabric.kill(number, death);
        }
        self.forget(at);
    }

    fn stop(&mut self, at: usize) {
        self.forget(at);
    }

    fn step(&mut self, until: Duration) -> bool {
        if std::mem::take(&mut self.touched) {
            self.fabric.run_for(&mut self.drivers, Duration::ZERO);
        } else {
            self.fabric.poll(&mut self.drivers);
        }
        let next = self.fabric.next_event();
        if next.is_some_and(|at| at.as_nanos() <= nanos(until)) {
            self.fabric.step();
            self.fabric.poll(&mut self.drivers);
            return true;
        }
        let left = until.saturating_sub(self.now());
        self.fabric.run_for(&mut self.drivers, left);
        false
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.fabric.now().as_nanos())
    }

    fn fault(&mut self, fault: Fault) -> bool {
        match fault {
            Fault::Nic { engine, nic, lost } => {
                let Some(engine) = self.number(engine) else { return false };
                if lost {
                    self.fabric.nic_down(engine, nic);
                } else {
                    self.fabric.nic_up(engine, nic);
                }
                true
            }
            Fault::Path { engine, peer, nic, remote_nic, cut, .. } => {
                self.cut(engine, peer, Path { nic, remote_nic }, cut)
            }
            Fault::Registration { fails } => {
                let rate = if fails { 2 } else { 0 };
                self.fabric.configure(|config| config.register_fails_one_in = rate);
                true
            }
        }
    }

    fn fails_over(&self) -> bool {
        self.order == Order::Fifo
    }

    fn is_virtual(&self) -> bool {
        true
    }

    fn breach(&self) -> Option<String> {
        let breaches = self.fabric.breaches();
        (breaches != crate::sim::Breaches::default()).then(|| format!("{breaches:?}"))
    }

    fn trace(&mut self) -> Vec<String> {
        let events = self.fabric.trace();
        if !events.is_empty() {
            self.fabric.keep_trace(0);
            self.fabric.keep_trace(TRACED);
        }
        events.iter().map(ToString::to_string).collect()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
