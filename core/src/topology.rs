//! Which NICs belong to which GPU, decided over a captured table of devices.
//!
//! Pure functions over text and a lent slice: the platform reads the devices of a machine (Linux: sysfs), and
//! whoever wants to know why has the same table as a file, one line for each device:
//!
//! ```text
//! # the bridges on the way from the root complex, and the device
//! pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:02.2/0000:59:00.0 vendor=10de class=030200 numa=0
//! pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.6/0000:55:00.0 vendor=1d0f class=020000 numa=0 rdma=rdmap85s0 mbit=200000
//! ```
//!
//! It opens nothing, and knows no transport: that a NIC can write to a GPU's memory is for others to find out.
//!
//! # How it is decided
//!
//! - RDMA devices are what counts; network interfaces do only where there is no RDMA device. Those without a link
//!   do not, nor those slower than a quarter of the fastest: they are there for something else.
//! - A GPU's NICs are its nearest ones ([`Closeness`]), without those that are nearer to another GPU, unless none
//!   are left; and of these not those slower than half of the fastest.
//! - GPUs that have the same nearest NICs share them equally: as many cards for each, in the order of the
//!   table, the rest for nobody; if there are fewer cards than GPUs, neighbours share one.
//! - The functions of one card go together, and its bandwidth counts once: ports share a slot.
//! - No GPU: the host has all NICs. And whatever an override says is so.
//!
//! # Invariants
//!
//! 1. If a NIC counts, each GPU has one; at most [`MAX_NICS`].
//! 2. No NIC is given while a nearer one is not, if both are equally fast.
//! 3. GPUs in equal places have equally many cards, and none in common if there are enough.
//! 4. A GPU that an override names has what it says; the others have what they had.
//! 5. No text panics; what is refused is refused with its place.
//! 6. Whoever uses several GPUs has the NICs of all of them in turn, each once.
//!
//! The tests enumerate small tables for 1 to 4 and 6, and truncate and change texts for 5. Fixtures of whole machines
//! are the platform's.

use core::cmp::Reverse;
use core::fmt;

use heapless::Vec;

use crate::device::PortName;
use crate::id::MAX_NICS;

/// How many fields a line can have.
const FIELDS: usize = 8;

/// A GPU or a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Device<'a> {
    /// Its root complex, the bridges that lead to it, and its address, separated by `/`: below `/sys/devices`
    /// on Linux. What is on no bus is `virtual/NAME`.
    pub path: &'a str,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI class: base, sub-class and interface.
    pub class: u32,
    /// Of a virtual function: the address of the function that it is one of.
    pub of: Option<&'a str>,
    /// The NUMA node that it is attached to, if that is known.
    pub numa: Option<u16>,
    /// Its name as an RDMA device.
    pub rdma: Option<&'a str>,
    /// Its name as a network interface.
    pub net: Option<&'a str>,
    /// Rate of its fastest port in Mbit/s; 0 if it is unknown.
    pub mbit: u32,
    /// Whether no port of it has a link.
    pub down: bool,
}

impl<'a> Device<'a> {
    /// PCI address, such as `0000:59:00.0`.
    #[must_use]
    pub fn address(&self) -> &'a str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }

    /// Whether it is a GPU: NVIDIA's, with a display (class 0300) or without (0302). NVSwitches and the
    /// sound of a display are not.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        const NVIDIA: u16 = 0x10de;
        self.vendor == NVIDIA && matches!(self.class >> 8, 0x0300 | 0x0302)
    }

    /// What a NIC is called: by its RDMA name, if it has one.
    #[must_use]
    pub fn nic_name(&self) -> Option<&'a str> {
        self.rdma.or(self.net)
    }

    /// What all functions of a card have in common: the way to it, and its address without the function's number. Addresses of virtual functions
    /// differ in more than that from the eighth on (PCI Express, SR-IOV: First VF Offset and VF Stride).
    fn card(&self) -> (&'a str, &'a str) {
        let (way, own) = self.path.rsplit_once('/').unwrap_or(("", self.path));
        let function = self.of.unwrap_or(own);
        (way, function.rsplit_once('.').map_or(function, |(card, _)| card))
    }

    /// Reads one line of a table. `None` for an empty one, or one that only comments.
    ///
    /// # Errors
    ///
    /// [`Misplaced`], in line 1.
    pub fn parse(line: &'a str) -> Result<Option<Self>, Misplaced<TableError>> {
        let mut words = words(line, is_space);
        let Some((at, path)) = words.next() else { return Ok(None) };
        let fault = |at, what| Err(Misplaced { line: 1, column: column(at), what });
        if path.contains('=') || path.split('/').count() < 2 || path.split('/').any(str::is_empty) {
            return fault(at, TableError::NotAPath);
        }
        let mut device = Self { path, ..Self::default() };
        let mut seen = Vec::<_, FIELDS>::new();
        for (at, word) in words {
            let (key, value) = match word.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (word, None),
            };
            let text = value.filter(|text| !text.is_empty());
            let hex = text.and_then(|text| u32::from_str_radix(text, 16).ok());
            let number = text.and_then(|text| text.parse::<u32>().ok());
            let short = |number| u16::try_from(number).ok();
            let understood = match key {
                "vendor" => hex.and_then(short).map(|id| device.vendor = id).is_some(),
                "class" => hex.map(|id| device.class = id).is_some(),
                "of" => text.map(|address| device.of = Some(address)).is_some(),
                "numa" => number.and_then(short).map(|node| device.numa = Some(node)).is_some(),
                "mbit" => number.map(|rate| device.mbit = rate).is_some(),
                "rdma" => text.map(|name| device.rdma = Some(name)).is_some(),
                "net" => text.map(|name| device.net = Some(name)).is_some(),
                "down" => {
                    device.down = true;
                    value.is_none()
                }
                _ => return fault(at, TableError::UnknownField),
            };
            if !understood {
                return fault(at, TableError::BadValue);
            }
            if seen.contains(&key) || seen.push(key).is_err() {
                return fault(at, TableError::Repeated);
            }
        }
        Ok(Some(device))
    }
}

/// The line of a table, which [`Device::parse`] reads.
impl fmt::Display for Device<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if (self.vendor, self.class) != (0, 0) {
            write!(f, " vendor={:04x} class={:06x}", self.vendor, self.class)?;
        }
        if let Some(function) = self.of {
            write!(f, " of={function}")?;
        }
        if let Some(node) = self.numa {
            write!(f, " numa={node}")?;
        }
        if let Some(name) = self.rdma {
            write!(f, " rdma={name}")?;
        }
        if let Some(name) = self.net {
            write!(f, " net={name}")?;
        }
        if self.mbit > 0 {
            write!(f, " mbit={}", self.mbit)?;
        }
        f.write_str(if self.down { " down" } else { "" })
    }
}

/// Reads a table, line by line; stops after the first line that is refused.
///
/// # Errors
///
/// [`Misplaced`] for each line that is no device.
pub fn table(text: &str) -> impl Iterator<Item = Result<Device<'_>, Misplaced<TableError>>> {
    let mut lines = text.lines().zip(1_u32..);
    let mut refused = false;
    core::iter::from_fn(move || {
        while !refused {
            let (text, line) = lines.next()?;
            match Device::parse(text) {
                Ok(None) => {}
                Ok(Some(device)) => return Some(Ok(device)),
                Err(fault) => {
                    refused = true;
                    return Some(Err(Misplaced { line, ..fault }));
                }
            }
        }
        None
    })
}

/// What is wrong, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Misplaced<E> {
    /// Line, from 1.
    pub line: u32,
    /// Byte of the line, from 1.
    pub column: u32,
    /// What is wrong with the word there.
    pub what: E,
}

impl<E: fmt::Display> fmt::Display for Misplaced<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.what)
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for Misplaced<E> {}

/// Why a word is refused in a table of devices.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableError {
    /// The first word of a line is no path of a device.
    NotAPath,
    /// There is no such field.
    UnknownField,
    /// The field cannot have this value.
    BadValue,
    /// The field is there twice.
    Repeated,
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAPath => {
                "not the path of a device, such as pci0000:00/0000:00:01.0/0000:01:00.0"
            }
            Self::UnknownField => {
                "not a field: vendor=HEX, class=HEX, numa=N, rdma=NAME, net=NAME, mbit=N, down"
            }
            Self::BadValue => "not a value of this field",
            Self::Repeated => "this field is there twice",
        })
    }
}

/// Why a word is refused in an override.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverrideError {
    /// It is not `OWNER=NIC,NIC`.
    NotAPair,
    /// There is no such GPU; or no `host` to speak of, since there are GPUs.
    UnknownOwner,
    /// This GPU was told its NICs before.
    Repeated,
    /// There is no such NIC.
    UnknownNic,
    /// The NIC is named twice.
    RepeatedNic,
    /// There are more than [`MAX_NICS`].
    TooManyNics,
}

impl fmt::Display for OverrideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAPair => f.write_str("not GPU=NIC,NIC, such as gpu0=mlx5_0,mlx5_1"),
            Self::UnknownOwner => f.write_str(
                "no such GPU: gpu0, gpu1, ... in the order of PCI addresses, or an address, or host if there \
                 is no GPU",
            ),
            Self::Repeated => f.write_str("this GPU is told its NICs twice"),
            Self::UnknownNic => f.write_str("no such NIC in the table of devices"),
            Self::RepeatedNic => f.write_str("this NIC is named twice"),
            Self::TooManyNics => write!(f, "more than {MAX_NICS} NICs"),
        }
    }
}

/// How near a NIC is to a GPU. The nearest are the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Closeness {
    /// Below the same bridge: a PCIe switch, or one root port.
    Switch {
        /// How many bridges from the root complex down their ways are the same. More are nearer.
        bridges: Reverse<u16>,
    },
    /// On the same root complex. Not so if their NUMA nodes differ, since then that one spans the machine.
    Complex,
    /// On the same NUMA node.
    Numa,
    /// In the same machine.
    Machine,
}

impl fmt::Display for Closeness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Switch { .. } => "same PCIe switch",
            Self::Complex => "same root complex",
            Self::Numa => "same NUMA node",
            Self::Machine => "same machine",
        })
    }
}

/// How near two devices are to each other.
///
/// ```
/// use immwire_core::topology::{Closeness, Device, closeness};
/// let at = |path| Device { path, ..Device::default() };
/// let gpu = at("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0");
/// let nic = at("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0");
/// assert!(matches!(closeness(&gpu, &nic), Closeness::Switch { bridges } if bridges.0 == 2));
/// assert_eq!(closeness(&gpu, &at("pci0000:15/0000:15:03.0")), Closeness::Complex);
/// assert_eq!(closeness(&gpu, &at("pci0000:9a/0000:9a:01.0")), Closeness::Machine);
/// ```
#[must_use]
pub fn closeness(gpu: &Device<'_>, nic: &Device<'_>) -> Closeness {
    let same_node = gpu.numa.zip(nic.numa).map(|(a, b)| a == b);
    match shared(gpu, nic).checked_sub(1) {
        Some(bridges @ 1..) => {
            Closeness::Switch { bridges: Reverse(u16::try_from(bridges).unwrap_or(u16::MAX)) }
        }
        Some(_) if same_node != Some(false) => Closeness::Complex,
        _ if same_node == Some(true) => Closeness::Numa,
        _ => Closeness::Machine,
    }
}

/// Takes a name in that is not there yet, if there is room.
fn add<'a>(names: &mut Vec<&'a str, MAX_NICS>, name: &'a str) {
    if !names.contains(&name) {
        let _ = names.push(name);
    }
}

/// How many steps their ways have in common: the root complex, and bridges. 0 for what is on no bus.
fn shared(gpu: &Device<'_>, nic: &Device<'_>) -> usize {
    let way = |path: &str| path.rfind('/').unwrap_or(0);
    let steps = |path| first_bytes(path, way(path)).split('/');
    if !gpu.path.starts_with("pci") {
        return 0;
    }
    steps(gpu.path).zip(steps(nic.path)).take_while(|(a, b)| a == b).count()
}

/// Whose NICs they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner<'a> {
    /// GPU number so many of the table.
    Gpu(usize, Device<'a>),
    /// The machine, which has no GPU.
    Host,
}

impl fmt::Display for Owner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(number, _) => write!(f, "gpu{number}"),
            Self::Host => f.write_str("host"),
        }
    }
}

/// Why a GPU has just these NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// They are the nearest.
    Nearest(Closeness),
    /// An override says so.
    Told,
    /// It has none: there is none, or none has a link.
    NoNic,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nearest(closeness) => closeness.fmt(f),
            Self::Told => f.write_str("as told"),
            Self::NoNic => f.write_str("no NIC with a link"),
        }
    }
}

/// One of a GPU's NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nic<'a> {
    /// The device.
    pub device: Device<'a>,
    /// What it is called, for a provider: one port of a device, if an override says so.
    pub name: &'a str,
    /// Mbit/s that it contributes: the rate of its card, divided by the ports of that card that this GPU
    /// has. 0 if it is unknown.
    pub mbit: u32,
}

/// A GPU, or the host, and its NICs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair<'a> {
    /// Whose they are.
    pub owner: Owner<'a>,
    /// The NICs, in the order of the table, or of the override.
    pub nics: Vec<Nic<'a>, MAX_NICS>,
    /// Why these.
    pub reason: Reason,
    /// The NUMA node whose processors serve them best: the GPU's, or else the NICs', if they agree.
    pub numa: Option<u16>,
}

impl Pair<'_> {
    /// Sum of the NICs' rates in Mbit/s; 0 if none is known. GPUs that share a NIC count it each.
    #[must_use]
    pub fn mbit(&self) -> u64 {
        self.nics.iter().map(|nic| u64::from(nic.mbit)).sum()
    }
}

/// A table of devices, and what somebody who knows better says of them.
#[derive(Debug, Clone, Copy)]
pub struct Topology<'a> {
    devices: &'a [Device<'a>],
    overrides: &'a str,
}

impl<'a> Topology<'a> {
    /// Takes the devices, ordered by address, and an override: none (`""`), or pairs such as
    /// `gpu0=mlx5_0,mlx5_1 0000:52:00.0=mlx5_4`, separated by spaces, `;` or lines, with comments after `#`. A NIC is a device
    /// with all its ports, or one port of an RDMA device: `mlx5_4:2`. Whether there is such a port, nobody here knows.
    ///
    /// # Errors
    ///
    /// [`Misplaced`], if the override says what cannot be.
    pub fn new(
        devices: &'a [Device<'a>],
        overrides: &'a str,
    ) -> Result<Self, Misplaced<OverrideError>> {
        let topology = Self { devices, overrides };
        for (line, text) in (1..).zip(overrides.lines()) {
            for (at, word) in words(text, is_separator) {
                topology.check(word, line, at).map_err(|(at, what)| Misplaced {
                    line,
                    column: column(at),
                    what,
                })?;
            }
        }
        Ok(topology)
    }

    /// Each GPU, or the host if there is none, with its NICs. Compares each GPU's place with each NIC's once for
    /// each GPU: milliseconds on the largest machines.
    pub fn pairs(self) -> impl Iterator<Item = Pair<'a>> {
        let host = self.gpus().next().is_none().then_some(Owner::Host);
        let owners = self.gpus().enumerate().map(|(number, gpu)| Owner::Gpu(number, gpu));
        owners.chain(host).map(move |owner| self.pair(owner))
    }

    /// The names of the NICs of whoever uses these GPUs, which are told by their PCI addresses, in either case: each GPU's
    /// first, then each one's second, and so on, none twice, [`MAX_NICS`] at most. None, if the table has none of the GPUs.
    ///
    /// Compares each of these GPUs' places with each NIC's: as [`pairs`](Self::pairs).
    #[must_use]
    pub fn names_for(self, gpus: &[&str]) -> Vec<&'a str, MAX_NICS> {
        // The first NICs of all GPUs, then the second, ...
        let mut ranks: [Vec<&str, MAX_NICS>; MAX_NICS] = core::array::from_fn(|_| Vec::new());
        for &address in gpus {
            let mut all = self.gpus().enumerate();
            let found = all.find(|(_, gpu)| gpu.address().eq_ignore_ascii_case(address));
            let Some((number, gpu)) = found else { continue };
            let pair = self.pair(Owner::Gpu(number, gpu));
            for (rank, nic) in ranks.iter_mut().zip(&pair.nics) {
                add(rank, nic.name);
            }
        }
        let mut names = Vec::new();
        ranks.iter().flatten().for_each(|name| add(&mut names, name));
        names
    }

    /// The NICs that count, in the order of the table.
    pub fn nics(self) -> impl Iterator<Item = Device<'a>> + Clone {
        let rdma = self.devices.iter().any(|device| device.rdma.is_some());
        let linked = move |device: &Device<'_>| {
            !device.down && if rdma { device.rdma.is_some() } else { device.net.is_some() }
        };
        let linked = self.devices.iter().copied().filter(linked);
        let fastest = linked.clone().map(|nic| nic.mbit).max().unwrap_or(0);
        linked.filter(move |nic| nic.mbit == 0 || nic.mbit >= fastest / 4)
    }

    fn gpus(self) -> impl Iterator<Item = Device<'a>> + Clone {
        self.devices.iter().copied().filter(Device::is_gpu)
    }

    fn owner(self, name: &str) -> Option<Owner<'a>> {
        let host = || (name == "host" && self.gpus().next().is_none()).then_some(Owner::Host);
        let number = name.strip_prefix("gpu").and_then(|number| number.parse::<usize>().ok());
        let found = self
            .gpus()
            .enumerate()
            .find(|(index, gpu)| Some(*index) == number || gpu.address() == name);
        found.map(|(number, gpu)| Owner::Gpu(number, gpu)).or_else(host)
    }

    /// Judges a word of the override; the place is within the line.
    fn check(self, word: &str, line: u32, at: usize) -> Result<(), (usize, OverrideError)> {
        let (name, list) = word.split_once('=').ok_or((at, OverrideError::NotAPair))?;
        let owner = self.owner(name).ok_or((at, OverrideError::UnknownOwner))?;
        let before =
            |&(other_line, other_at, _): &(u32, usize, &str)| (other_line, other_at) < (line, at);
        let mut told = self.told().take_while(before);
        if told.any(|(_, _, word)| self.told_to(word, &owner).is_some()) {
            return Err((at, OverrideError::Repeated));
        }
        let mut at = at.saturating_add(name.len()).saturating_add(1);
        for (index, nic) in list.split(',').enumerate() {
            if self.told_nic(nic).is_none() {
                return Err((at, OverrideError::UnknownNic));
            }
            if list.split(',').take(index).any(|other| other == nic) {
                return Err((at, OverrideError::RepeatedNic));
            }
            if index >= MAX_NICS {
                return Err((at, OverrideError::TooManyNics));
            }
            at = at.saturating_add(nic.len()).saturating_add(1);
        }
        Ok(())
    }

    /// The words of the override, with line and byte.
    fn told(self) -> impl Iterator<Item = (u32, usize, &'a str)> {
        let lines = (1..).zip(self.overrides.lines());
        lines.flat_map(|(line, text)| {
            words(text, is_separator).map(move |(at, word)| (line, at, word))
        })
    }

    /// The NICs that this word of the override is about, if it is about that owner.
    fn told_to(self, word: &'a str, owner: &Owner<'_>) -> Option<&'a str> {
        let (name, list) = word.split_once('=')?;
        (self.owner(name).as_ref() == Some(owner)).then_some(list)
    }

    fn pair(self, owner: Owner<'a>) -> Pair<'a> {
        let told = self.told().find_map(|(_, _, word)| self.told_to(word, &owner));
        let (chosen, reason) = match told {
            Some(list) => (self.named(list), Reason::Told),
            None => self.nearest(&owner),
        };
        let nics: Vec<_, MAX_NICS> =
            chosen.iter().filter_map(|(nic, name)| part(nic, name, &chosen)).collect();
        let mut nodes = nics.iter().map(|nic| nic.device.numa);
        let first = nodes.next().flatten();
        let agreed = first.filter(|_| nodes.all(|node| node == first));
        let numa = match owner {
            Owner::Gpu(_, gpu) => gpu.numa.or(agreed),
            Owner::Host => agreed,
        };
        Pair { owner, nics, reason, numa }
    }

    fn named(self, list: &'a str) -> Chosen<'a> {
        let find = |name| Some((self.told_nic(name)?, name));
        list.split(',').filter_map(find).take(MAX_NICS).collect()
    }

    /// The device that an override calls so: by its name, or as one port of an RDMA device.
    fn told_nic(self, name: &str) -> Option<Device<'a>> {
        let find =
            |is: &dyn Fn(&Device<'_>) -> bool| self.devices.iter().copied().find(|it| is(it));
        let whole = find(&|device| device.nic_name() == Some(name));
        whole.or_else(|| {
            let port = PortName::read(name, |_| false);
            let has_number = port.port.is_some_and(|number| number > 0);
            find(&|device| device.rdma == Some(port.device)).filter(|_| has_number)
        })
    }

    fn nearest(self, owner: &Owner<'a>) -> (Chosen<'a>, Reason) {
        let (gpu, place) = match *owner {
            Owner::Gpu(_, gpu) => (Some(gpu), self.place(&gpu)),
            Owner::Host => (None, self.nics().next().map(|_| Place::MACHINE)),
        };
        let Some(place) = place else { return (Vec::new(), Reason::NoNic) };
        let peers = || self.gpus().filter(|peer| self.place(peer) == Some(place));
        let (mine, all) = match gpu {
            Some(gpu) => (peers().take_while(|peer| *peer != gpu).count(), peers().count()),
            None => (0, 1),
        };

        let pool = self.pool(gpu, place.closeness);
        // Each card by the first of its functions.
        let first = |nic: &Device<'_>| {
            let same = |other: &Device<'_>| other.card() == nic.card();
            pool.clone().find(same).is_none_or(|other| other == *nic)
        };
        let cards = pool.clone().filter(first);
        let count = cards.clone().count();
        let (skip, share) = match count.checked_div(all).unwrap_or(0) {
            0 => (mine.saturating_mul(count).checked_div(all).unwrap_or(0), 1),
            share => (mine.saturating_mul(share), share),
        };
        let functions = |card: Device<'a>| {
            pool.clone().filter(move |nic: &Device<'_>| nic.card() == card.card())
        };
        let nics = cards.clone().skip(skip).take(share).flat_map(functions).take(MAX_NICS);
        let nics = nics.filter_map(|nic| Some((nic, nic.nic_name()?)));
        (nics.collect(), Reason::Nearest(place.closeness))
    }

    /// Where a GPU is, as far as NICs are concerned; `None` if there are none.
    fn place(self, gpu: &Device<'a>) -> Option<Place<'a>> {
        let best = self.nics().min_by_key(|nic| closeness(gpu, nic))?;
        let closeness = closeness(gpu, &best);
        let steps = shared(gpu, &best);
        let above = first_steps(gpu.path, steps);
        Some(match closeness {
            Closeness::Switch { .. } => Place { closeness, above, numa: None },
            Closeness::Complex => Place { closeness, above, numa: gpu.numa },
            Closeness::Numa => Place { closeness, above: "", numa: gpu.numa },
            Closeness::Machine => Place::MACHINE,
        })
    }

    /// The NICs that are to be shared by those GPUs whose place is this one's.
    fn pool(
        self,
        gpu: Option<Device<'a>>,
        near: Closeness,
    ) -> impl Iterator<Item = Device<'a>> + Clone {
        let at_hand = move |nic: &Device<'a>| gpu.is_none_or(|gpu| closeness(&gpu, nic) == near);
        // Others that are nearer to it have something nearer still.
        let free = move |nic: &Device<'a>| {
            self.gpus().all(|other| {
                let theirs = closeness(&other, nic);
                theirs >= near || self.nics().any(|nic| closeness(&other, &nic) < theirs)
            })
        };
        let any_free = self.nics().any(|nic| at_hand(&nic) && free(&nic));
        let usable = move |nic: &Device<'a>| at_hand(nic) && (!any_free || free(nic));
        let fastest = self.nics().filter(usable).map(|nic| nic.mbit).max().unwrap_or(0);
        let fast = move |nic: &Device<'_>| nic.mbit == 0 || nic.mbit >= fastest / 2;
        self.nics().filter(move |nic| fast(nic) && usable(nic))
    }
}

/// Where a GPU is: the same for those that have the same NICs at hand.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Place<'a> {
    /// How near the nearest NICs are.
    closeness: Closeness,
    /// The way to the bridge, or the root complex, below which they are; empty if they share none.
    above: &'a str,
    /// The NUMA node, if it makes a difference.
    numa: Option<u16>,
}

impl Place<'_> {
    const MACHINE: Self = Self { closeness: Closeness::Machine, above: "", numa: None };
}

/// NICs, and what each is called.
type Chosen<'a> = Vec<(Device<'a>, &'a str), MAX_NICS>;

/// What one of the chosen NICs contributes.
fn part<'a>(nic: &Device<'a>, name: &'a str, chosen: &Chosen<'a>) -> Option<Nic<'a>> {
    let others = chosen.iter().map(|(other, _)| other);
    let ports = || others.clone().filter(|other| other.card() == nic.card());
    let fastest = ports().map(|port| port.mbit).max().unwrap_or(0);
    let count = u32::try_from(ports().count()).unwrap_or(u32::MAX);
    Some(Nic { device: *nic, name, mbit: fastest.checked_div(count)? })
}

/// The first steps of a path.
fn first_steps(path: &str, steps: usize) -> &str {
    let ends = path.match_indices('/').map(|(at, _)| at);
    first_bytes(path, ends.take(steps).last().unwrap_or(0))
}

fn first_bytes(text: &str, bytes: usize) -> &str {
    text.get(..bytes).unwrap_or(text)
}

/// The words of a line and at which byte each begins, without what follows a `#`. Separators are ASCII.
fn words(line: &str, separates: fn(char) -> bool) -> impl Iterator<Item = (usize, &str)> {
    let line = line.split('#').next().unwrap_or_default();
    let place = |next: &mut usize, word: &'_ str| {
        let at = *next;
        *next = at.saturating_add(word.len()).saturating_add(1);
        Some(at)
    };
    let places = line.split(separates).scan(0, place);
    places.zip(line.split(separates)).filter(|(_, word)| !word.is_empty())
}

fn is_space(c: char) -> bool {
    c.is_ascii_whitespace()
}

fn is_separator(c: char) -> bool {
    c.is_ascii_whitespace() || c == ';'
}

fn column(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests;
