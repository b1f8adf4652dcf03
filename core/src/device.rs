//! RDMA devices: which of their ports are an engine's NICs, how each of these is, and whether one offers what is asked of it.
//!
//! For verbs: a NIC is one port of a device. `mlx5_0:2` is the second port of `mlx5_0`, as UCX writes it too. Opens nothing:
//! what there is comes as a list that was captured.
//!
//! | a name without a number | means |
//! |---|---|
//! | where NICs are named ([`named`]) | one port: the first that fits, or else that is active, or else the first |
//! | where devices are ([`spread`]) | all of its ports that fit |
//!
//! # Invariants
//!
//! 1. [`spread`] gives ports that fit, none twice, as many as there are or an engine has room for; no device's second before
//!    each one's first.
//! 2. [`named`] gives a port of that device, and of that number if there is one.
//! 3. A device that has a colon in its name is found by it.
//! 4. Each change of a NIC is told once, and none after its loss ([`Health`]).
//!
//! The tests enumerate machines of up to three devices with up to three ports in all states, and all that can become of a NIC
//! in eight steps.

use core::fmt;

use heapless::Vec;

use crate::id::MAX_NICS;

/// How far a port can be used; the best is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortState {
    /// It has no link.
    Down,
    /// It is active, but something else is the matter.
    Active,
    /// It can be used.
    Fit,
}

/// A port of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DevicePort<'a> {
    /// The device's name.
    pub device: &'a str,
    /// Its number on the device, from 1.
    pub number: u8,
    /// What it is good for.
    pub state: PortState,
}

/// What somebody calls a NIC: a device, and one of its ports if that is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortName<'a> {
    /// The device's name.
    pub device: &'a str,
    /// The port's number, whether there is one or not.
    pub port: Option<u8>,
}

impl<'a> PortName<'a> {
    /// Reads a name, where `is_device` knows which devices there are: what is one's name as a whole is no other's port.
    /// Behind the last colon is a port's number if it is one, of digits alone, of up to 255.
    #[must_use]
    pub fn read(name: &'a str, is_device: impl FnOnce(&str) -> bool) -> Self {
        let whole = Self { device: name, port: None };
        let Some((device, digits)) = name.rsplit_once(':') else { return whole };
        if device.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return whole;
        }
        match digits.parse() {
            Ok(port) if !is_device(name) => Self { device, port: Some(port) },
            _ => whole,
        }
    }

    fn of(name: &'a str, ports: &[DevicePort<'_>]) -> Self {
        Self::read(name, |name| ports.iter().any(|port| port.device == name))
    }

    fn is(&self, port: &DevicePort<'_>) -> bool {
        port.device == self.device && self.port.is_none_or(|number| number == port.number)
    }
}

/// As [`PortName::read`] reads it.
impl fmt::Display for PortName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// Why a name means no port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPort {
    /// There is no such device.
    NoDevice,
    /// The device has no port of that number.
    NoNumber {
        /// As named.
        number: u8,
        /// How many it has.
        ports: usize,
    },
}

impl fmt::Display for NoPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str("there is no such device"),
            Self::NoNumber { number, ports: 1 } => {
                write!(f, "it has port 1 alone, and no port {number}")
            }
            Self::NoNumber { number, ports } => {
                write!(f, "it has ports 1 to {ports}, and no port {number}")
            }
        }
    }
}

impl core::error::Error for NoPort {}

/// Which of `ports`, each device's in the order of their numbers, is the NIC of that name. O(ports).
///
/// # Errors
///
/// [`NoPort`].
pub fn named(ports: &[DevicePort<'_>], name: &str) -> Result<usize, NoPort> {
    let name = PortName::of(name, ports);
    let of_device = ports.iter().filter(|port| port.device == name.device).count();
    let mut best = None;
    for (at, port) in ports.iter().enumerate().filter(|(_, port)| name.is(port)) {
        // The first of equals.
        if best.is_none_or(|(state, _)| port.state > state) {
            best = Some((port.state, at));
        }
    }
    match (best, name.port) {
        (Some((_, at)), _) => Ok(at),
        (None, Some(number)) if of_device > 0 => Err(NoPort::NoNumber { number, ports: of_device }),
        _ => Err(NoPort::NoDevice),
    }
}

/// Which of `ports` are the NICs of whoever has these devices, or ports of devices: those that fit; each name's first, then
/// each one's second, and so on, none twice. O(names × ports²).
#[must_use]
pub fn spread<'n>(
    ports: &[DevicePort<'_>],
    names: impl Iterator<Item = &'n str> + Clone,
) -> Vec<usize, MAX_NICS> {
    let mut chosen = Vec::new();
    for rank in 0..ports.len() {
        for name in names.clone() {
            let name = PortName::of(name, ports);
            let fits = |port: &DevicePort<'_>| name.is(port) && port.state == PortState::Fit;
            let mut fitting = ports.iter().enumerate().filter(|(_, port)| fits(port));
            let Some((at, _)) = fitting.nth(rank) else { continue };
            if !chosen.contains(&at) && chosen.push(at).is_err() {
                return chosen;
            }
        }
    }
    chosen
}

/// How one of an engine's NICs is, as its device tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Health {
    /// Its port is active.
    Up,
    /// Its port is not: nothing is sent there until it is again.
    Down,
    /// The device has failed, for good.
    Lost,
}

impl Health {
    /// Whether something can be sent over it.
    #[must_use]
    pub const fn is_usable(self) -> bool {
        matches!(self, Self::Up)
    }

    /// Whether it will never be used again.
    #[must_use]
    pub const fn is_lost(self) -> bool {
        matches!(self, Self::Lost)
    }

    /// The port is up, or down. Returns whether that is a change, which is to be told; what a lost one says is none.
    #[must_use]
    pub const fn turn(&mut self, is_up: bool) -> bool {
        let changes = !self.is_lost() && self.is_usable() != is_up;
        if changes {
            *self = if is_up { Self::Up } else { Self::Down };
        }
        changes
    }

    /// The device has failed. Returns whether that is new, and to be told.
    #[must_use]
    pub const fn lose(&mut self) -> bool {
        let is_new = !self.is_lost();
        *self = Self::Lost;
        is_new
    }
}

/// What devices may offer for memory that is not pinned, but brought when it is needed (on-demand paging), over reliable
/// connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Paging {
    /// Any of it.
    pub any: bool,
    /// One-sided writes, from such memory and to it.
    pub write: bool,
}

impl Paging {
    /// Whether regions can be registered so: writes from them and to them are all that is done with regions.
    ///
    /// # Errors
    ///
    /// [`NoPaging`].
    pub const fn check(self) -> Result<(), NoPaging> {
        match self {
            Self { any: false, .. } => Err(NoPaging::None),
            Self { write: false, .. } => Err(NoPaging::NoWrites),
            Self { any: true, write: true } => Ok(()),
        }
    }
}

/// What a device lacks for memory that is not pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NoPaging {
    /// All of it.
    None,
    /// Writes over reliable connections.
    NoWrites,
}

impl fmt::Display for NoPaging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "it offers no on-demand paging",
            Self::NoWrites => "its on-demand paging is without writes over reliable connections",
        })
    }
}

impl core::error::Error for NoPaging {}

/// Who makes Soft-RoCE, as its devices say (`ibv_device_attr::vendor_id`); nobody, before Linux 5.7.
const SOFT_ROCE: u32 = 0x00ff_ffff;

/// Whether a device's completion queue can be made longer while it is in use, on this release of Linux (as `uname -r` says it). Soft-RoCE
/// of 5.14 to 6.0 copies what is in the queue without end, for good. Later releases of 5.15 and 5.19 do not, and what distributions call by
/// an older number may: that is not told apart here.
#[must_use]
pub fn may_grow(vendor: u32, release: &str) -> bool {
    if vendor != 0 && vendor != SOFT_ROCE {
        return true;
    }
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u16>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 1),
        _ => false,
    }
}

/// Which of libibverbs's extended calls a device is used by; by those that all drivers have otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Calls {
    /// Writes are posted by them (`ibv_wr_start` to `ibv_wr_complete`).
    pub posts: bool,
    /// Completions are read by them (`ibv_start_poll` to `ibv_end_poll`).
    pub polls: bool,
}

impl Calls {
    /// None of them.
    pub const CLASSIC: Self = Self { posts: false, polls: false };
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self { posts: false, polls: false } => "classic posts and polls",
            Self { posts: true, polls: false } => "extended posts, classic polls",
            Self { posts: false, polls: true } => "classic posts, extended polls",
            Self { posts: true, polls: true } => "extended posts and polls",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;
    use std::vec::Vec;

    use super::*;

    #[test]
    fn queues_keep_their_length_where_the_kernel_would_not_come_back() {
        let soft = [0, SOFT_ROCE];
        let hangs = ["4.18.0-553.el8_10", "5.14.0", "5.15.0-91-generic", "5.19", "6.0.19"];
        for release in ["6.1.0-13-amd64", "6.18.3", "10.0"] {
            assert!(soft.iter().all(|vendor| may_grow(*vendor, release)), "{release}");
        }
        for release in hangs.into_iter().chain(["", "6", "x.y", "-6.1", "99999.1"]) {
            assert!(!soft.iter().any(|vendor| may_grow(*vendor, release)), "{release}");
            assert!(may_grow(0x02c9, release), "of NVIDIA's, {release}");
        }
    }

    const DEVICES: [&str; 3] = ["a", "b", "b:2"];
    const STATES: [PortState; 3] = [PortState::Down, PortState::Active, PortState::Fit];

    /// Calls for each machine of three devices with none to three ports, each in any state.
    fn each_machine(mut call: impl FnMut(&[DevicePort<'static>])) {
        // Digits of three: how many ports, then their states.
        let devices: Vec<Vec<PortState>> = (0..=3_u32)
            .flat_map(|ports| {
                let state = |word: usize, at| STATES[word / 3_usize.pow(at) % 3];
                (0..3_usize.pow(ports))
                    .map(move |word| (0..ports).map(|at| state(word, at)).collect())
            })
            .collect();
        assert_eq!(devices.len(), 1 + 3 + 9 + 27);
        for a in &devices {
            for b in &devices {
                for c in devices.iter().take(1 + 3) {
                    let states = [a, b, c].into_iter().zip(DEVICES);
                    let ports = states.flat_map(|(states, device)| {
                        let port = move |(number, &state)| DevicePort { device, number, state };
                        (1..).zip(states).map(port)
                    });
                    call(&ports.collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn a_name_is_one_port_and_the_best_that_it_may_mean() {
        each_machine(|ports| {
            for device in DEVICES {
                let of = |name| ports.iter().filter(move |port| port.device == name);
                let index = |wanted: &DevicePort<'_>| ports.iter().position(|port| port == wanted);
                // `b:2` is a device where there is one, and else a port of `b`.
                if of(device).count() == 0 && device != "b:2" {
                    assert_eq!(named(ports, device), Err(NoPort::NoDevice));
                } else if of(device).count() > 0 {
                    let best = |state| of(device).find(|port| port.state == state);
                    let best = best(PortState::Fit).or_else(|| best(PortState::Active));
                    let best = best.or_else(|| of(device).next()).and_then(index);
                    assert_eq!(named(ports, device).ok(), best);
                }
                for number in [0, 1, 2, 3, 4, 255] {
                    let name = std::format!("{device}:{number}");
                    let whole = ports.iter().any(|port| port.device == name);
                    let found = of(device).find(|port| port.number == number).and_then(index);
                    match named(ports, &name) {
                        Ok(at) if whole => assert_eq!(ports[at].device, name),
                        Ok(at) => assert_eq!(Some(at), found),
                        Err(NoPort::NoNumber { number: told, ports }) => {
                            assert_eq!((told, ports, found), (number, of(device).count(), None));
                            assert!(ports > 0);
                        }
                        Err(NoPort::NoDevice) => assert_eq!(of(device).count(), 0),
                    }
                }
            }
        });
    }

    #[test]
    fn devices_have_all_ports_that_fit_and_their_first_before_any_second() {
        let choices: [&[&str]; 6] =
            [&["a", "b", "b:2"], &["b", "a"], &["a", "a:2"], &["a:2", "a"], &["b:1", "c"], &[]];
        each_machine(|ports| {
            for names in choices {
                let chosen = spread(ports, names.iter().copied());
                let meant = |port: &DevicePort<'_>| {
                    names.iter().any(|name| PortName::of(name, ports).is(port))
                };
                let fit = |port: &DevicePort<'_>| port.state == PortState::Fit && meant(port);
                assert_eq!(
                    chosen.len(),
                    ports.iter().filter(|port| fit(port)).count().min(MAX_NICS)
                );
                let mut seen = Vec::new();
                let mut last = 0;
                for at in chosen {
                    assert!(fit(&ports[at]) && !seen.contains(&at), "{names:?} of {ports:?}");
                    // How many of the same device that fit come before it: they never go down.
                    let before = ports[..at].iter().filter(|port| port.device == ports[at].device);
                    let rank = before.filter(|port| fit(port)).count();
                    if !names.contains(&"a:2") {
                        assert!(rank >= last, "{names:?} of {ports:?}");
                        last = rank;
                    }
                    seen.push(at);
                }
            }
        });
        // In the order of the names, and a port that is named first is first.
        let port = |device, number| DevicePort { device, number, state: PortState::Fit };
        let ports = [port("a", 1), port("a", 2), port("b", 1), port("b", 2)];
        let chosen = |names: &[&'static str]| spread(&ports, names.iter().copied()).to_vec();
        assert_eq!(chosen(&["a", "b"]), [0, 2, 1, 3]);
        assert_eq!(chosen(&["b", "a"]), [2, 0, 3, 1]);
        assert_eq!(chosen(&["a:2", "a"]), [1, 0]);
        assert_eq!(chosen(&["b:2"]), [3]);
    }

    #[test]
    fn an_engine_has_no_more_ports_than_it_has_room_for() {
        let port = |number| DevicePort { device: "a", number, state: PortState::Fit };
        let ports: Vec<_> = (1..=20).map(port).collect();
        assert_eq!(spread(&ports, ["a"].into_iter()).to_vec(), (0..MAX_NICS).collect::<Vec<_>>());
    }

    #[test]
    fn names_are_read_and_written() {
        for (text, device, port) in [
            ("mlx5_0", "mlx5_0", None),
            ("mlx5_0:2", "mlx5_0", Some(2)),
            ("mlx5_0:0", "mlx5_0", Some(0)),
            ("mlx5_0:255", "mlx5_0", Some(255)),
            ("mlx5_0:256", "mlx5_0:256", None),
            ("mlx5_0:", "mlx5_0:", None),
            ("mlx5_0:+2", "mlx5_0:+2", None),
            ("mlx5_0:-1", "mlx5_0:-1", None),
            ("mlx5_0:2x", "mlx5_0:2x", None),
            ("mlx5_0:1:2", "mlx5_0:1", Some(2)),
            (":2", ":2", None),
            (":", ":", None),
            ("", "", None),
            ("7", "7", None),
        ] {
            let read = PortName::read(text, |_| false);
            assert_eq!(read, PortName { device, port }, "{text}");
            assert_eq!(read.to_string(), text);
            assert_eq!(PortName::read(text, |_| true), PortName { device: text, port: None });
        }
        assert_eq!(
            NoPort::NoNumber { number: 3, ports: 2 }.to_string(),
            "it has ports 1 to 2, and no port 3"
        );
    }

    /// A port that goes up and down, and a device that fails, in all sequences of eight.
    #[test]
    fn each_change_of_a_nic_is_told_once_and_the_last_is_its_loss() {
        let (mut turns, mut losses) = (0, 0);
        for word in 0..3_usize.pow(8) {
            let (mut health, mut is_up, mut is_lost) = (Health::Up, true, false);
            for step in 0..8 {
                match word / 3_usize.pow(step) % 3 {
                    2 => {
                        assert_eq!(health.lose(), !is_lost);
                        losses += usize::from(!is_lost);
                        is_lost = true;
                    }
                    up => {
                        let is_new = !is_lost && is_up != (up == 1);
                        assert_eq!(health.turn(up == 1), is_new);
                        turns += usize::from(is_new);
                        is_up = up == 1;
                    }
                }
                assert_eq!(health.is_lost(), is_lost);
                assert_eq!(health.is_usable(), is_up && !is_lost);
            }
        }
        assert!(turns > 1000 && losses > 1000, "{turns} {losses}");
    }

    #[test]
    fn regions_are_unpinned_where_writes_are_offered() {
        for any in [false, true] {
            for write in [false, true] {
                let expected = match (any, write) {
                    (true, true) => Ok(()),
                    (true, false) => Err(NoPaging::NoWrites),
                    (false, _) => Err(NoPaging::None),
                };
                assert_eq!(Paging { any, write }.check(), expected);
            }
        }
    }

    #[test]
    fn calls_are_named_for_what_they_do() {
        let word = |extended| if extended { "extended" } else { "classic" };
        for posts in [false, true] {
            for polls in [false, true] {
                let text = Calls { posts, polls }.to_string();
                let spelt = text.replace(" posts and polls", " posts, = polls");
                let spelt = spelt.replace('=', word(posts));
                assert_eq!(spelt, std::format!("{} posts, {} polls", word(posts), word(polls)));
                assert_eq!(Calls { posts, polls } == Calls::CLASSIC, !posts && !polls);
            }
        }
    }
}
