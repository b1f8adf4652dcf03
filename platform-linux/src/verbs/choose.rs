//! Which ports an engine has, of those that were found.
//!
//! Opens nothing. What names mean is `immwire_core::device`'s, which devices belong to a GPU `immwire_core::topology`'s.
//!
//! # Invariants
//!
//! - An engine has each port once, and none that does not fit.
//! - Of what options name it has what fits; of what belongs to its GPUs, all or an error.

use std::sync::Arc;

use immwire_core::device::{DevicePort, PortState, named, spread};

use super::device::{Device, Found, Unfit};
use super::{VerbsConfig, VerbsError};

/// The engine's ports, in the order of its NICs: those that the options name; or else all of the devices that belong to the
/// GPUs at these addresses, or of all devices.
///
/// # Errors
///
/// [`VerbsError::NoDevice`] and [`VerbsError::Pairing`].
pub(super) fn choose(
    config: &VerbsConfig,
    found: Vec<Found>,
    gpus: Option<&[String]>,
) -> Result<Vec<Arc<Device>>, VerbsError> {
    let devices: Vec<_> = found.iter().map(|it| it.device.clone()).collect();
    let ports = devices.iter().zip(&found);
    let ports = ports.map(|(device, &Found { port: number, state, .. })| DevicePort {
        device,
        number,
        state,
    });
    let Choice { wanted, ports, missing, all } = decide(config, &ports.collect::<Vec<_>>(), gpus)?;
    for Unfit { device, why } in &missing {
        tracing::warn!(device, why, "a NIC that was named is not there");
    }
    let (mut nics, mut unfit) = (Vec::new(), missing);
    let is_whole = unfit.is_empty() || !all;
    for (at, port) in found.into_iter().enumerate() {
        match port.nic {
            Ok(nic) => nics.push((at, nic)),
            Err(why) => {
                let Unfit { device, why: reason } = &why;
                if ports.contains(&at) {
                    tracing::warn!(device, why = reason, "a NIC that was named cannot be used");
                }
                unfit.push(why);
            }
        }
    }
    let nic = |port: usize| nics.iter().find(|(at, _)| *at == port).map(|(_, nic)| Arc::clone(nic));
    let chosen: Vec<_> = ports.into_iter().filter_map(nic).collect();
    if chosen.is_empty() || !is_whole {
        return Err(VerbsError::NoDevice { wanted, unfit });
    }
    Ok(chosen)
}

/// What an engine is to have.
#[derive(Debug, Default, PartialEq, Eq)]
struct Choice {
    /// What was asked for, if anything.
    wanted: Vec<String>,
    /// Places in the list of ports, each once.
    ports: Vec<usize>,
    /// What is not there.
    missing: Vec<Unfit>,
    /// Whether nothing may be missing.
    all: bool,
}

fn decide(
    config: &VerbsConfig,
    ports: &[DevicePort<'_>],
    gpus: Option<&[String]>,
) -> Result<Choice, VerbsError> {
    let names = config.options.devices.clone();
    if !names.is_empty() {
        let mut choice = Choice { wanted: names, ..Choice::default() };
        for device in &choice.wanted {
            match named(ports, device) {
                Ok(at) if choice.ports.contains(&at) => {}
                Ok(at) => choice.ports.push(at),
                Err(why) => {
                    choice.missing.push(Unfit { device: device.clone(), why: why.to_string() });
                }
            }
        }
        return Ok(choice);
    }
    if let Some(gpus) = gpus {
        let fit = ports.iter().filter(|port| port.state == PortState::Fit);
        let usable: Vec<_> = fit.map(|port| port.device).collect();
        let wanted = config.pairing.names(gpus, &usable)?;
        tracing::info!(nics = ?wanted, "which NICs belong to the GPUs; if none, all are taken");
        if !wanted.is_empty() {
            let lacks = |name: &&String| spread(ports, [name.as_str()].into_iter()).is_empty();
            let missing = wanted.iter().filter(lacks).map(|device| Unfit {
                device: device.clone(),
                why: match named(ports, device) {
                    Ok(_) => "it cannot be used".to_owned(),
                    Err(why) => why.to_string(),
                },
            });
            let missing = missing.collect();
            let ports = spread(ports, wanted.iter().map(String::as_str)).to_vec();
            return Ok(Choice { wanted, ports, missing, all: true });
        }
    }
    let devices = ports.chunk_by(|a, b| a.device == b.device).filter_map(<[_]>::first);
    let ports = spread(ports, devices.map(|port| port.device)).to_vec();
    Ok(Choice { ports, ..Choice::default() })
}

#[cfg(test)]
mod tests {
    use immwire_core::id::EngineId;

    use super::*;
    use crate::topology::Table;

    /// Two cards with two ports each, of which one port is down; and one with a port that is active, but has no GID.
    const PORTS: [(&str, u8, PortState); 5] = [
        ("mlx5_0", 1, PortState::Down),
        ("mlx5_0", 2, PortState::Fit),
        ("mlx5_1", 1, PortState::Fit),
        ("mlx5_1", 2, PortState::Fit),
        ("mlx5_2", 1, PortState::Active),
    ];
    const GPU: &str = "0000:10:00.0";
    const TABLE: &str = "\
pci0000:10/0000:10:00.0 vendor=10de class=030200
pci0000:10/0000:11:00.0 rdma=mlx5_1 mbit=200000
pci0000:20/0000:21:00.0 rdma=mlx5_0 mbit=200000
pci0000:20/0000:22:00.0 rdma=mlx5_2 mbit=200000
";

    fn decided(devices: &[&str], pairing: Option<&str>) -> Choice {
        let ports = PORTS.map(|(device, number, state)| DevicePort { device, number, state });
        let mut config = VerbsConfig::new(EngineId(1));
        config.options.devices = devices.iter().map(|&name| name.to_owned()).collect();
        config.pairing.table = Some(Table::from_text(TABLE).unwrap());
        config.pairing.overrides = pairing.unwrap_or_default().to_owned();
        let gpus = [GPU.to_owned()];
        decide(&config, &ports, pairing.map(|_| gpus.as_slice())).unwrap()
    }

    #[test]
    fn without_a_name_all_active_ports_are_taken_first_ones_first() {
        let all = Choice { ports: vec![1, 2, 3], ..Choice::default() };
        assert_eq!(decided(&[], None), all);
        // A GPU whose address nobody knows.
        let mut config = VerbsConfig::new(EngineId(1));
        config.pairing.table = Some(Table::from_text("").unwrap());
        let ports = PORTS.map(|(device, number, state)| DevicePort { device, number, state });
        assert_eq!(decide(&config, &ports, Some(&[GPU.to_owned()])).unwrap(), all);
    }

    #[test]
    fn names_are_ports_in_the_order_in_which_they_are_given() {
        for (names, ports, missing) in [
            (&["mlx5_0"][..], &[1][..], ""),
            (&["mlx5_1"], &[2], ""),
            (&["mlx5_1:2", "mlx5_0"], &[3, 1], ""),
            (&["mlx5_0:1"], &[0], ""),
            (&["mlx5_2", "mlx5_1", "mlx5_1:1"], &[4, 2], ""),
            (&["mlx5_9", "mlx5_1"], &[2], "mlx5_9: there is no such device"),
            (&["mlx5_1:3"], &[], "mlx5_1:3: it has ports 1 to 2, and no port 3"),
            (&["mlx5_2:0"], &[], "mlx5_2:0: it has port 1 alone, and no port 0"),
        ] {
            let choice = decided(names, None);
            let said = choice.missing.iter().map(|it| format!("{}: {}", it.device, it.why));
            assert_eq!(said.collect::<String>(), missing, "{names:?}");
            assert_eq!((choice.ports.as_slice(), choice.all), (ports, false), "{names:?}");
        }
    }

    #[test]
    fn a_gpu_has_all_ports_of_its_devices_or_the_one_that_is_told() {
        for (told, ports, missing) in [
            ("", &[2, 3][..], None),
            ("gpu0=mlx5_0", &[1], None),
            ("gpu0=mlx5_0,mlx5_1", &[1, 2, 3], None),
            ("gpu0=mlx5_1:2", &[3], None),
            ("gpu0=mlx5_1,mlx5_0:1", &[2, 3], Some("mlx5_0:1")),
            ("gpu0=mlx5_2", &[], Some("mlx5_2")),
            ("gpu0=mlx5_1:7", &[], Some("mlx5_1:7")),
        ] {
            let choice = decided(&[], Some(told));
            assert_eq!((choice.ports.as_slice(), choice.all), (ports, true), "{told}");
            let names: Vec<_> = choice.missing.iter().map(|it| it.device.as_str()).collect();
            assert_eq!(names, missing.into_iter().collect::<Vec<_>>(), "{told}");
        }
    }
}
