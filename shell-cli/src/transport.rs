//! Which transport an engine gets, from flags and addresses; and what to do when it does not work.
//!
//! Pure: opens nothing. The words for a failure are the engine's own; here the next step is added.

use crate::args::{GpuArgs, PairingArgs, Provider, TransportArgs};
use crate::motor::MotorError;
use immwire::core::peer::DownReason;
use immwire::core::wire::ProviderKind;
use immwire::libfabric::LibfabricError;
use immwire::provider::ConnectError;
use immwire::shm::ShmError;
use immwire::verbs::VerbsError;
use immwire::{
    AddPeerError, BuildError, LibfabricOptions, NetAddr, PeerError, Place, Transport, VerbsOptions,
};
use std::num::NonZeroU32;
use std::path::PathBuf;

/// The interface that reaches this host alone.
const LOOPBACK: &str = "lo";
/// libfabric's provider for AWS devices, which have no loopback interface.
const EFA: &str = "efa";

/// Why the flags make no transport. The user's to correct.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// A flag of one transport's, for another.
    #[error("--{option} is for --provider {of}, not for {provider}: leave it out")]
    NoMeaning {
        /// Which flag.
        option: &'static str,
        /// Whose it is.
        of: &'static str,
        /// For which transport.
        provider: &'static str,
    },
    /// Files and messages are in the host's memory.
    #[error("--provider nvlink is for bench: files are in the memory of the host; leave it out")]
    OnlyMeasured,
    /// What NICs are for.
    #[error(
        "--pairing and --topology say which NICs belong to --gpus, with --provider libfabric or verbs: leave it out"
    )]
    NothingToPair,
    /// What it is for.
    #[error(
        "--staging is for the memory of --gpus, with --provider libfabric or verbs: leave it out"
    )]
    NothingToStage,
    /// There is no other transport.
    #[error("--shm-on-host is for --provider libfabric and verbs: leave it out")]
    NothingBeside,
    /// No GPU was named, or too many.
    #[error(
        "--gpus is one GPU, or a source and a destination of which one may be host; --provider nvlink needs it"
    )]
    Gpus,
}

/// Whose memory is written from and to, where some is of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPair {
    /// The measuring process's.
    pub src: Place,
    /// The peer's.
    pub dst: Place,
    /// SMs that a copy takes at most.
    pub sms: Option<NonZeroU32>,
    /// The one that copies, as the engine chooses it: the source's, or else the destination's.
    writer: u32,
}

impl GpuPair {
    /// The GPU that copies.
    #[must_use]
    pub const fn writer(&self) -> u32 {
        self.writer
    }

    /// Both, each once.
    #[must_use]
    pub fn ordinals(&self) -> Vec<u32> {
        let other = [self.src, self.dst].into_iter().find_map(|place| match place {
            Place::Gpu(ordinal) if ordinal != self.writer => Some(ordinal),
            _ => None,
        });
        std::iter::once(self.writer).chain(other).collect()
    }
}

/// What an engine of a benchmark is made on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carrier {
    /// The transport.
    pub transport: Transport,
    /// Shared memory beside it.
    pub shm_on_host: bool,
    /// GPUs whose memory is written from and to.
    pub gpus: Option<GpuPair>,
    /// Which NICs are theirs.
    pub pairing: PairingArgs,
    /// Bytes of the host's memory that theirs goes by way of.
    pub staging: Option<u64>,
}

impl Carrier {
    /// A transport, with nothing beside it and host memory alone.
    #[must_use]
    pub fn of(transport: Transport) -> Self {
        let pairing = PairingArgs::default();
        Self { transport, shm_on_host: false, gpus: None, pairing, staging: None }
    }

    /// Its name, as in a row and on the command line.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match (&self.gpus, self.shm_on_host, &self.transport) {
            (Some(_), _, Transport::Shm) => label(Provider::Nvlink),
            (_, true, Transport::Libfabric(_)) => ProviderKind::ShmLibfabric.name(),
            (_, true, Transport::Verbs(_)) => ProviderKind::ShmVerbs.name(),
            _ => name(&self.transport),
        }
    }

    /// The GPUs, if they copy themselves, over shared memory alone.
    #[must_use]
    pub fn copying(&self) -> Option<&GpuPair> {
        self.gpus.as_ref().filter(|_| self.transport == Transport::Shm)
    }

    /// The flags that say the same to another process of this program.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        let mut flags = match self.copying() {
            Some(_) => vec!["--provider".to_owned(), self.name().to_owned()],
            None => flags(&self.transport),
        };
        flags.extend(self.shm_on_host.then(|| "--shm-on-host".to_owned()));
        let text = |place| match place {
            Place::Host => "host".to_owned(),
            Place::Gpu(ordinal) => ordinal.to_string(),
        };
        if let Some(GpuPair { src, dst, sms, .. }) = self.gpus {
            flags.extend(["--gpus".to_owned(), format!("{},{}", text(src), text(dst))]);
            flags.extend(sms.into_iter().flat_map(|sms| ["--sms".to_owned(), sms.to_string()]));
        }
        let staging = self.staging.map(|bytes| ["--staging".to_owned(), bytes.to_string()]);
        flags.extend(staging.into_iter().flatten());
        let PairingArgs { pairing, topology } = &self.pairing;
        flags.extend(pairing.iter().flat_map(|pairs| ["--pairing".to_owned(), pairs.clone()]));
        let path = |file: &PathBuf| file.to_string_lossy().into_owned();
        flags.extend(topology.iter().flat_map(|file| ["--topology".to_owned(), path(file)]));
        flags
    }
}

/// Where the peers of the engine are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peers<'a> {
    /// Anywhere; the engine waits for them.
    Come,
    /// Processes that this one starts.
    Own,
    /// At this address.
    At(&'a NetAddr),
}

impl GpuArgs {
    /// The two whose memory it is.
    fn pair(&self) -> Result<GpuPair, TransportError> {
        let (src, dst) = match *self.gpus.as_slice() {
            [both] => (both, both),
            [src, dst] => (src, dst),
            _ => return Err(TransportError::Gpus),
        };
        let writer = match (src, dst) {
            (Place::Gpu(writer), _) | (Place::Host, Place::Gpu(writer)) => writer,
            (Place::Host, Place::Host) => return Err(TransportError::Gpus),
        };
        Ok(GpuPair { src, dst, sms: self.sms, writer })
    }
}

impl TransportArgs {
    /// The flags that were given, and whose each is.
    fn given(&self) -> impl Iterator<Item = (&'static str, Provider)> {
        [
            ("fabric", Provider::Libfabric, self.fabric.is_some()),
            ("interface", Provider::Libfabric, self.interface.is_some()),
            ("device", Provider::Verbs, !self.device.is_empty()),
            ("gid-index", Provider::Verbs, self.gid_index.is_some()),
            ("traffic-class", Provider::Verbs, self.traffic_class.is_some()),
            ("service-level", Provider::Verbs, self.service_level.is_some()),
            ("ack-timeout", Provider::Verbs, self.ack_timeout.is_some()),
            ("retry-count", Provider::Verbs, self.retry_count.is_some()),
            ("on-demand", Provider::Verbs, self.on_demand),
            ("classic", Provider::Verbs, self.classic),
        ]
        .into_iter()
        .filter_map(|(option, of, given)| given.then_some((option, of)))
    }

    /// As [`TransportArgs::choose`], with GPUs where they were asked for: by copies of theirs, or by another transport's
    /// NICs.
    ///
    /// # Errors
    ///
    /// [`TransportError`].
    pub fn carrier(&self, gpus: &GpuArgs, peers: Peers<'_>) -> Result<Carrier, TransportError> {
        let of = label(Provider::Nvlink);
        let option = if gpus.gpus.is_empty() { "sms" } else { "gpus" };
        let given = !gpus.gpus.is_empty() || gpus.sms.is_some();
        let pairs = gpus.pairing != PairingArgs::default();
        // Whoever is called at an address is reached by what it names, memory of GPUs or not.
        let by_copies =
            !matches!(peers, Peers::At(address) if far(address.provider()) != ProviderKind::Shm);
        match (self.provider, self.given().next()) {
            (Some(Provider::Nvlink), None) => {}
            (None, None) if given && by_copies => {}
            (Some(Provider::Nvlink), Some((option, of))) => {
                let (of, provider) = (label(of), label(Provider::Nvlink));
                return Err(TransportError::NoMeaning { option, of, provider });
            }
            _ => {
                let carrier = self.without_gpus(peers)?;
                let copy = carrier.transport == Transport::Shm;
                if given && (copy || gpus.sms.is_some()) {
                    let option = if copy { option } else { "sms" };
                    let provider = carrier.name();
                    return Err(TransportError::NoMeaning { option, of, provider });
                }
                let pair = if given { Some(gpus.pair()?) } else { None };
                if pairs && !given {
                    return Err(TransportError::NothingToPair);
                }
                let (staging, pairing) = (gpus.staging, gpus.pairing.clone());
                if staging.is_some() && !given {
                    return Err(TransportError::NothingToStage);
                }
                return Ok(Carrier { gpus: pair, pairing, staging, ..carrier });
            }
        }
        if gpus.staging.is_some() {
            return Err(TransportError::NothingToStage);
        }
        if pairs {
            return Err(TransportError::NothingToPair);
        }
        if self.shm_on_host {
            return Err(TransportError::NothingBeside);
        }
        let pair = Some(gpus.pair()?);
        Ok(Carrier { gpus: pair, ..Carrier::of(Transport::Shm) })
    }

    /// Whether nothing was said that has no meaning where GPUs alone copy.
    ///
    /// # Errors
    ///
    /// [`TransportError`].
    pub fn for_gpus_alone(&self) -> Result<(), TransportError> {
        match self.given().next() {
            Some((option, of)) => {
                let (of, provider) = (label(of), label(Provider::Nvlink));
                Err(TransportError::NoMeaning { option, of, provider })
            }
            None if self.shm_on_host => Err(TransportError::NothingBeside),
            None => Ok(()),
        }
    }

    /// As [`TransportArgs::choose`], with shared memory beside it if that was asked for, or the address has it.
    ///
    /// # Errors
    ///
    /// [`TransportError`].
    pub fn without_gpus(&self, peers: Peers<'_>) -> Result<Carrier, TransportError> {
        let transport = self.choose(peers)?;
        let has_both = |address: &NetAddr| address.provider().sides().is_some();
        let shm_on_host = match peers {
            Peers::At(address) if self.provider.is_none() => self.shm_on_host || has_both(address),
            _ => self.shm_on_host,
        };
        if shm_on_host && transport == Transport::Shm {
            return Err(TransportError::NothingBeside);
        }
        Ok(Carrier { shm_on_host, ..Carrier::of(transport) })
    }

    /// The transport that was asked for. Without `--provider` it is the address's, the first flag's, or else
    /// shared memory. Own peers are on this host, so over libfabric they are reached by loopback, if no interface was
    /// named and its provider has one.
    ///
    /// # Errors
    ///
    /// [`TransportError`].
    pub fn choose(&self, peers: Peers<'_>) -> Result<Transport, TransportError> {
        let provider = self.provider.unwrap_or_else(|| match peers {
            Peers::At(address) => match far(address.provider()) {
                ProviderKind::Libfabric => Provider::Libfabric,
                ProviderKind::Verbs => Provider::Verbs,
                _ => Provider::Shm,
            },
            Peers::Come | Peers::Own => self.given().next().map_or(Provider::Shm, |(_, of)| of),
        });
        if let Some((option, of)) = self.given().find(|(_, of)| *of != provider) {
            let (of, provider) = (label(of), label(provider));
            return Err(TransportError::NoMeaning { option, of, provider });
        }
        Ok(match provider {
            Provider::Shm => Transport::Shm,
            Provider::Nvlink => return Err(TransportError::OnlyMeasured),
            Provider::Libfabric => {
                let near = peers == Peers::Own && self.fabric.as_deref() != Some(EFA);
                let domain = self.interface.clone().or_else(|| near.then(|| LOOPBACK.to_owned()));
                let provider = self.fabric.clone();
                Transport::Libfabric(LibfabricOptions { library: None, provider, domain })
            }
            Provider::Verbs => {
                let usual = VerbsOptions::default();
                Transport::Verbs(VerbsOptions {
                    devices: self.device.clone(),
                    gid_index: self.gid_index,
                    traffic_class: self.traffic_class.unwrap_or(usual.traffic_class),
                    service_level: self.service_level.unwrap_or(usual.service_level),
                    ack_timeout: self.ack_timeout.unwrap_or(usual.ack_timeout),
                    retry_count: self.retry_count.unwrap_or(usual.retry_count),
                    on_demand: self.on_demand,
                    classic: self.classic,
                })
            }
        })
    }
}

/// The transport to other hosts, of two.
fn far(kind: ProviderKind) -> ProviderKind {
    kind.sides().map_or(kind, |(_, far)| far)
}

/// As on the command line.
const fn label(provider: Provider) -> &'static str {
    match provider {
        Provider::Shm => ProviderKind::Shm.name(),
        Provider::Libfabric => ProviderKind::Libfabric.name(),
        Provider::Verbs => ProviderKind::Verbs.name(),
        Provider::Nvlink => "nvlink",
    }
}

/// The name of a transport, as in a row and on the command line.
#[must_use]
pub const fn name(transport: &Transport) -> &'static str {
    match transport {
        Transport::Shm => ProviderKind::Shm.name(),
        Transport::Libfabric(_) => ProviderKind::Libfabric.name(),
        Transport::Verbs(_) => ProviderKind::Verbs.name(),
    }
}

/// The flags that say the same to another process of this program.
#[must_use]
pub fn flags(transport: &Transport) -> Vec<String> {
    let mut flags = vec!["--provider".to_owned(), name(transport).to_owned()];
    let mut add = |flag: &str, value: Option<String>| {
        flags.extend(value.into_iter().flat_map(|value| [flag.to_owned(), value]));
    };
    match transport {
        Transport::Shm => {}
        Transport::Libfabric(options) => {
            add("--fabric", options.provider.clone());
            add("--interface", options.domain.clone());
        }
        Transport::Verbs(options) => {
            let devices = (!options.devices.is_empty()).then(|| options.devices.join(","));
            add("--device", devices);
            add("--gid-index", options.gid_index.map(|index| index.to_string()));
            for (name, value) in [
                ("--traffic-class", options.traffic_class),
                ("--service-level", options.service_level),
                ("--ack-timeout", options.ack_timeout),
                ("--retry-count", options.retry_count),
            ] {
                add(name, Some(value.to_string()));
            }
            flags.extend(options.on_demand.then(|| "--on-demand".to_owned()));
            flags.extend(options.classic.then(|| "--classic".to_owned()));
        }
    }
    flags
}

/// What the user can do about a failure of the engine; none if its words say it all.
#[must_use]
pub fn advice(error: &MotorError) -> Option<String> {
    match error {
        MotorError::Build(BuildError::Libfabric(error)) => fabric_advice(error),
        MotorError::Build(BuildError::Verbs(error)) => verbs_advice(error),
        MotorError::Build(BuildError::Provider(ShmError::Gpu { source, .. })) => {
            cuda_advice(source).map(str::to_owned)
        }
        MotorError::AddPeer(AddPeerError::Connect(ConnectError::OtherProvider { found, .. })) => {
            Some(match ProviderKind::from_name(found).and_then(ProviderKind::sides) {
                Some((_, far)) => format!("give --provider {far} --shm-on-host"),
                None => format!("leave --provider and --shm-on-host out, or give --provider {found}"),
            })
        }
        MotorError::AddPeer(AddPeerError::Connect(ConnectError::OtherNetwork {
            provider, ..
        })) => Some(format!(
            "give both ends --fabric {provider}, or what the other one has, and --interface networks of one family"
        )),
        MotorError::Peer(
            PeerError::Timeout { .. } | PeerError::Down { reason: DownReason::NeverAnswered, .. },
        ) => Some(
            "see that the peer runs, that no firewall is between, and that both are on one network (--interface; \
             lo for both, if they are on one host; --device and --gid-index over RDMA)"
                .to_owned(),
        ),
        _ => None,
    }
}

/// What to do about GPUs and NICs that are not there as somebody says.
const PAIR_OTHERS: &str = "name others with --pairing, or leave it out; `immwire doctor` shows the GPUs and NICs that there are, by these names";

fn fabric_advice(error: &LibfabricError) -> Option<String> {
    let next = match error {
        // What is missing, and where it was looked for, has been said.
        LibfabricError::Load(_)
        | LibfabricError::Nics { .. }
        | LibfabricError::Peers { .. }
        | LibfabricError::OlderEfa { .. } => return None,
        LibfabricError::NoDevice { domain: Some(_), seen, .. } if !seen.is_empty() => {
            "name one of these with --interface, or leave it out; `immwire doctor` says why others do \
             not fit"
        }
        LibfabricError::NoDevice { .. }
        | LibfabricError::UnknownProvider { .. }
        | LibfabricError::Name { .. } => {
            "name another with --fabric, or leave it out; `immwire doctor` says which fit, and why others \
             do not"
        }
        LibfabricError::Pairing(_) | LibfabricError::NoSuchNic { .. } => PAIR_OTHERS,
        LibfabricError::EmulatedWrites { .. } => {
            "update libfabric and the device's driver, or give --fabric tcp"
        }
        _ => "`immwire doctor` says what libfabric has here; FI_LOG_LEVEL=warn makes it say more",
    };
    Some(next.to_owned())
}

/// What to do about GPUs that cannot be used; none if the error says it all.
#[must_use]
pub const fn cuda_advice(error: &immwire_cuda::Error) -> Option<&'static str> {
    use immwire_cuda::Error as Cuda;
    Some(match error {
        Cuda::NoDriver => {
            "install NVIDIA's driver; a container must be started with the GPUs and their driver (libcuda.so.1)"
        }
        Cuda::DriverLacks { .. } => "install a later driver",
        Cuda::NoDevice { .. } => {
            "name GPUs that are there; `immwire doctor` lists them, and CUDA_VISIBLE_DEVICES hides some"
        }
        Cuda::KernelsAbsent => {
            "build it again where there is an nvcc, or with IMMWIRE_NVCC naming one (cuda/toolchain gets one)"
        }
        _ => return None,
    })
}

fn verbs_advice(error: &VerbsError) -> Option<String> {
    let next = match error {
        // What is missing, or out of range, has been said.
        VerbsError::Load(_) | VerbsError::Nics { .. } | VerbsError::Option { .. } => return None,
        VerbsError::NoDevice { wanted, .. } if !wanted.is_empty() => {
            "name another with --device or --pairing, or leave it out; `rdma link` lists what the kernel has"
        }
        VerbsError::Pairing(_) => PAIR_OTHERS,
        VerbsError::NoPaging { .. } => {
            "leave --on-demand out; `immwire doctor` says which devices offer it"
        }
        VerbsError::NoDevice { .. } => {
            "without RDMA NICs, --provider libfabric goes over TCP; `immwire doctor` says what is here"
        }
        _ => {
            "see that `ibv_rc_pingpong` works on the device, and that `ulimit -l` allows to lock the memory"
        }
    };
    Some(next.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::motor::{Mode, Motor};

    fn args(
        provider: Option<Provider>,
        fabric: Option<&str>,
        interface: Option<&str>,
    ) -> TransportArgs {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let (fabric, interface) = (owned(fabric), owned(interface));
        TransportArgs { provider, fabric, interface, ..TransportArgs::default() }
    }

    fn libfabric(fabric: Option<&str>, interface: Option<&str>) -> Transport {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let (provider, domain) = (owned(fabric), owned(interface));
        Transport::Libfabric(LibfabricOptions { library: None, provider, domain })
    }

    #[test]
    fn what_is_not_said_follows_from_the_rest() {
        let shm = Motor::new(&Transport::Shm, 1, Mode::Polled).unwrap();
        let at = Peers::At(shm.engine().address());
        for peers in [Peers::Come, Peers::Own, at] {
            assert_eq!(args(None, None, None).choose(peers), Ok(Transport::Shm));
            let asked = args(Some(Provider::Libfabric), Some("tcp"), Some("eth0")).choose(peers);
            assert_eq!(asked, Ok(libfabric(Some("tcp"), Some("eth0"))));
        }
        let near = args(None, Some("tcp"), None);
        assert_eq!(near.choose(Peers::Own), Ok(libfabric(Some("tcp"), Some("lo"))));
        assert_eq!(near.choose(Peers::Come), Ok(libfabric(Some("tcp"), None)));
        assert_eq!(
            args(None, Some("efa"), None).choose(Peers::Own),
            Ok(libfabric(Some("efa"), None))
        );
        let named = args(None, None, Some("eth0")).choose(Peers::Own);
        assert_eq!(named, Ok(libfabric(None, Some("eth0"))));
    }

    #[test]
    fn an_address_says_its_transport() {
        use immwire::core::wire::NicAddr;
        let bytes = [1_u8; 16].into_iter().collect();
        let nic = NicAddr { speed_gbps: 100, address: bytes };
        let address = NetAddr::new(ProviderKind::Libfabric, immwire::EngineId(7), &[nic]).unwrap();
        let chosen = args(None, None, Some("lo")).choose(Peers::At(&address));
        assert_eq!(chosen, Ok(libfabric(None, Some("lo"))));
        let shm = args(Some(Provider::Shm), None, None).choose(Peers::At(&address));
        assert_eq!(shm, Ok(Transport::Shm), "the engine says that it is the wrong one");
    }

    #[test]
    fn shared_memory_is_put_beside_another_transport_alone() {
        let none = GpuArgs::default();
        let with = |args: TransportArgs| TransportArgs { shm_on_host: true, ..args };
        let asked = with(args(Some(Provider::Libfabric), None, Some("eth0")));
        let carrier = asked.carrier(&none, Peers::Own).unwrap();
        assert_eq!(carrier.transport, libfabric(None, Some("eth0")));
        assert_eq!((carrier.shm_on_host, carrier.name()), (true, "shm-libfabric"));
        let flags = carrier.flags().join(" ");
        assert_eq!(flags, "--provider libfabric --interface eth0 --shm-on-host");
        for alone in [args(None, None, None), args(Some(Provider::Shm), None, None)] {
            let refused = with(alone).carrier(&none, Peers::Come);
            assert_eq!(refused, Err(TransportError::NothingBeside));
        }
        let gpus = GpuArgs { gpus: vec![Place::Gpu(0)], ..GpuArgs::default() };
        let refused = with(args(None, None, None)).carrier(&gpus, Peers::Own);
        assert_eq!(refused, Err(TransportError::NothingBeside));
        // An address says it.
        let near =
            immwire::core::wire::NicAddr { speed_gbps: 1, address: [1; 48].into_iter().collect() };
        let nics = [near.clone(), near];
        for (kind, name) in
            [(ProviderKind::ShmLibfabric, "shm-libfabric"), (ProviderKind::ShmVerbs, "shm-verbs")]
        {
            let address = NetAddr::new(kind, immwire::EngineId(7), &nics).unwrap();
            let carrier = args(None, None, None).carrier(&none, Peers::At(&address)).unwrap();
            assert_eq!((carrier.name(), carrier.shm_on_host), (name, true));
        }
    }

    #[test]
    fn flags_of_one_transport_are_refused_for_another() {
        let refused = args(Some(Provider::Shm), None, Some("eth0")).choose(Peers::Own);
        let (of, provider) = ("libfabric", "shm");
        assert_eq!(refused, Err(TransportError::NoMeaning { option: "interface", of, provider }));
        let mixed =
            TransportArgs { device: vec!["mlx5_0".to_owned()], ..args(None, Some("tcp"), None) };
        let (of, provider) = ("verbs", "libfabric");
        let error = TransportError::NoMeaning { option: "device", of, provider };
        assert_eq!(mixed.choose(Peers::Come), Err(error));
    }

    #[test]
    fn a_device_or_an_entry_of_its_table_means_verbs() {
        let device = TransportArgs {
            device: vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()],
            gid_index: Some(3),
            traffic_class: Some(104),
            service_level: Some(3),
            ack_timeout: Some(17),
            retry_count: Some(2),
            ..TransportArgs::default()
        };
        let expected = VerbsOptions {
            devices: device.device.clone(),
            gid_index: Some(3),
            traffic_class: 104,
            service_level: 3,
            ack_timeout: 17,
            retry_count: 2,
            ..VerbsOptions::default()
        };
        assert_eq!(device.choose(Peers::Own), Ok(Transport::Verbs(expected)));
        let index = TransportArgs { gid_index: Some(1), ..TransportArgs::default() };
        assert!(matches!(index.choose(Peers::Come), Ok(Transport::Verbs(_))));
        let paged = TransportArgs { on_demand: true, ..TransportArgs::default() };
        let options = VerbsOptions { on_demand: true, ..VerbsOptions::default() };
        assert_eq!(paged.choose(Peers::Own), Ok(Transport::Verbs(options)));
        let classic = TransportArgs { classic: true, ..TransportArgs::default() };
        let options = VerbsOptions { classic: true, ..VerbsOptions::default() };
        assert_eq!(classic.choose(Peers::Own), Ok(Transport::Verbs(options)));
    }

    #[test]
    fn gpus_are_a_pair_of_which_one_copies() {
        let sms = NonZeroU32::new(4);
        let ask = |places: &[Place]| {
            let gpus = GpuArgs { gpus: places.to_vec(), sms, ..GpuArgs::default() };
            args(Some(Provider::Nvlink), None, None).carrier(&gpus, Peers::Own)
        };
        let (host, gpu) = (Place::Host, Place::Gpu);
        for (places, src, dst, ordinals) in [
            (vec![gpu(0), gpu(1)], gpu(0), gpu(1), vec![0, 1]),
            (vec![gpu(3)], gpu(3), gpu(3), vec![3]),
            (vec![host, gpu(1)], host, gpu(1), vec![1]),
            (vec![gpu(2), host], gpu(2), host, vec![2]),
        ] {
            let carrier = ask(&places).unwrap();
            let pair = carrier.gpus.unwrap();
            assert_eq!((pair.src, pair.dst, pair.ordinals()), (src, dst, ordinals.clone()));
            assert_eq!((pair.writer(), carrier.name()), (ordinals[0], "nvlink"));
        }
        for none in [vec![], vec![host], vec![host, host], vec![gpu(0), gpu(1), gpu(2)]] {
            assert_eq!(ask(&none), Err(TransportError::Gpus), "{none:?}");
        }
        let two = GpuArgs { gpus: vec![gpu(0), gpu(1)], ..GpuArgs::default() };
        let implied = args(None, None, None).carrier(&two, Peers::Own).unwrap();
        assert!(implied.gpus.is_some());
        // NICs read and write: nobody's SMs do.
        let efa = args(None, Some("efa"), None);
        let carrier = efa.carrier(&two, Peers::Come).unwrap();
        assert_eq!(
            (carrier.transport.clone(), carrier.name()),
            (libfabric(Some("efa"), None), "libfabric")
        );
        assert_eq!((carrier.copying(), carrier.gpus.unwrap().ordinals()), (None, vec![0, 1]));
        let (of, provider) = ("nvlink", "libfabric");
        let with_sms = GpuArgs { sms, ..two.clone() };
        let error = TransportError::NoMeaning { option: "sms", of, provider };
        assert_eq!(efa.carrier(&with_sms, Peers::Come), Err(error));
        let error = TransportError::NoMeaning { option: "gpus", of, provider: "shm" };
        assert_eq!(args(Some(Provider::Shm), None, None).carrier(&two, Peers::Own), Err(error));
        let (of, provider) = (provider, of);
        assert_eq!(
            args(Some(Provider::Nvlink), Some("tcp"), None).carrier(&two, Peers::Own),
            Err(TransportError::NoMeaning { option: "fabric", of, provider })
        );
        let files = args(Some(Provider::Nvlink), None, None).choose(Peers::Own);
        assert_eq!(files, Err(TransportError::OnlyMeasured));
        // NICs are paired with GPUs, where NICs are.
        let pairing = PairingArgs { pairing: Some("gpu0=mlx5_0".to_owned()), topology: None };
        let paired = GpuArgs { pairing: pairing.clone(), ..two };
        let none = GpuArgs { pairing, ..GpuArgs::default() };
        for (provider, gpus) in
            [(Some(Provider::Nvlink), &paired), (None, &paired), (Some(Provider::Verbs), &none)]
        {
            let refused = args(provider, None, None).carrier(gpus, Peers::Come);
            assert_eq!(refused, Err(TransportError::NothingToPair), "{provider:?}");
        }
        // And staged, where they are.
        let two = GpuArgs { gpus: vec![gpu(0), gpu(1)], ..GpuArgs::default() };
        let (staged, none) = (
            GpuArgs { staging: Some(1 << 26), ..two },
            GpuArgs { staging: Some(1), ..GpuArgs::default() },
        );
        let efa = args(None, Some("efa"), None);
        assert_eq!(efa.carrier(&staged, Peers::Come).unwrap().staging, Some(1 << 26));
        let beside = TransportArgs { shm_on_host: true, ..efa };
        let both = beside.carrier(&staged, Peers::Come).unwrap();
        assert_eq!((both.staging, both.shm_on_host), (Some(1 << 26), true));
        let (nvlink, verbs) =
            (args(Some(Provider::Nvlink), None, None), args(Some(Provider::Verbs), None, None));
        for (transport, gpus) in [(&beside, &none), (&nvlink, &staged), (&verbs, &none)] {
            let refused = transport.carrier(gpus, Peers::Come);
            assert_eq!(refused, Err(TransportError::NothingToStage), "{transport:?}");
        }
        let plain = args(None, None, None).carrier(&GpuArgs::default(), Peers::Own);
        assert_eq!(plain, Ok(Carrier::of(Transport::Shm)));
    }

    #[test]
    fn the_flags_of_a_transport_give_it_again() {
        use clap::Parser;
        #[derive(Parser)]
        struct Only {
            #[command(flatten)]
            transport: TransportArgs,
            #[command(flatten)]
            gpus: GpuArgs,
        }
        for (src, dst, writer) in
            [(Place::Gpu(0), Place::Gpu(1), 0), (Place::Host, Place::Gpu(7), 7)]
        {
            for sms in [None, NonZeroU32::new(9)] {
                let gpus = Some(GpuPair { src, dst, sms, writer });
                let carrier = Carrier { gpus, ..Carrier::of(Transport::Shm) };
                let gpus = Some(GpuPair { src, dst, sms: None, writer });
                let transport = Transport::Verbs(VerbsOptions::default());
                let pairing = PairingArgs {
                    pairing: sms.map(|_| "gpu0=a,b gpu1=c".to_owned()),
                    topology: sms.map(|_| "a table".into()),
                };
                let none = Carrier::of(transport);
                let staged = Carrier { gpus, staging: Some(5 << 20), ..none.clone() };
                let beside = Carrier { shm_on_host: true, ..staged.clone() };
                let by_nics = Carrier { shm_on_host: sms.is_some(), gpus, pairing, ..none };
                for carrier in [carrier, by_nics, staged, beside] {
                    let flags = carrier.flags();
                    let only = Only::parse_from(["x".to_owned()].into_iter().chain(flags));
                    assert_eq!(only.transport.carrier(&only.gpus, Peers::Come), Ok(carrier));
                }
            }
        }
        for transport in [
            Transport::Shm,
            libfabric(None, None),
            libfabric(Some("tcp;ofi_rxm"), Some("eth0")),
            libfabric(None, Some("lo")),
            Transport::Verbs(VerbsOptions::default()),
            Transport::Verbs(VerbsOptions {
                devices: vec!["rxe0".to_owned(), "rxe1".to_owned()],
                gid_index: Some(7),
                traffic_class: 255,
                service_level: 15,
                ack_timeout: 31,
                retry_count: 0,
                on_demand: true,
                classic: true,
            }),
        ] {
            let only = Only::parse_from(["x".to_owned()].into_iter().chain(flags(&transport)));
            assert_eq!(only.transport.choose(Peers::Come), Ok(transport));
        }
    }
}
