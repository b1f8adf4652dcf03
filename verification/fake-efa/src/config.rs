//! What the environment says of the modelled device and its network. Read once, at the first `fi_getinfo`, as
//! libfabric reads its own variables.
//!
//! Nothing here switches a rule off: it sizes the device, and chooses how late and in which order things happen.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// The modelled node.
#[derive(Debug)]
pub(crate) struct Config {
    /// `FAKE_EFA_SEED`: what the disorder follows from; from the clock if not given. The log names it.
    pub seed: u64,
    /// `FAKE_EFA_NICS` (4): how many devices there are.
    pub nics: u8,
    /// `FAKE_EFA_FABRICS` (`efa-direct`): which fabrics are offered, separated by commas.
    pub direct: bool,
    /// The other fabric of the list.
    pub efa: bool,
    /// `FAKE_EFA_MAX_RMA` (1 MiB; a real device has about 1 GiB): the longest write, in bytes.
    pub max_rma: usize,
    /// `FAKE_EFA_TX_SIZE` (64): the depth of a send queue.
    pub tx_size: usize,
    /// `FAKE_EFA_RX_SIZE` (128): the depth of a receive queue.
    pub rx_size: usize,
    /// `FAKE_EFA_DELAY_US` (200): the longest delay of each step of a delivery.
    pub delay: Duration,
    /// `FAKE_EFA_LATE_US` (0): how much later than that it is reported what has arrived.
    pub late: Duration,
    /// `FAKE_EFA_LATE_WRITES_US` (0): how much later still, if a write has brought it.
    pub late_writes: Duration,
    /// `FAKE_EFA_DEAD_MS` (300): how long the device tries before it reports a dead peer.
    pub dead: Duration,
    /// `FAKE_EFA_SILENT_MS` (30,000): how long it waits for a peer that exists and says nothing: one whose process is
    /// stopped, since in the model a device stops with its process.
    pub silent: Duration,
    /// `FAKE_EFA_EARLY_ACK` (1): whether a completion may be read before the bytes have landed, as documented: it says
    /// that the remote device has them.
    pub early_ack: bool,
    /// `FAKE_EFA_EMULATED_WRITE` (0): what the option of that name says.
    pub emulated_write: bool,
    /// `FAKE_EFA_HMEM` (1): whether GPUs' memory can be registered; not if `FI_HMEM` is `system`, as with libfabric.
    pub hmem: bool,
    /// `FAKE_EFA_PIN_UNTIL`: registering 1 MiB or more takes until this file exists, if given.
    pub pin_until: Option<PathBuf>,
    /// `FAKE_EFA_BREAKS`: the process's how many-th endpoint, from 0, is in error from the next that is posted there, once this
    /// file exists and says so, if given.
    pub breaks: Option<PathBuf>,
    /// `FAKE_EFA_UNSOLICITED` (1): whether the device takes a write with data without a posted receive.
    pub unsolicited: bool,
}

impl Config {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let number = |name: &str, default: u64, range: std::ops::RangeInclusive<u64>| {
            let Some(text) = variable(name) else { return Ok(default) };
            match text.parse() {
                Ok(value) if range.contains(&value) => Ok(value),
                _ => Err(format!("{name}={text}: not a number of {range:?}")),
            }
        };
        let size = |name: &str, default, range| {
            number(name, default, range).map(|n| usize::try_from(n).unwrap_or(0))
        };
        let (mut direct, mut efa) = (false, false);
        for name in variable("FAKE_EFA_FABRICS").as_deref().unwrap_or("efa-direct").split(',') {
            match name {
                "efa-direct" => direct = true,
                "efa" => efa = true,
                _ => return Err(format!("FAKE_EFA_FABRICS: {name} is not efa-direct or efa")),
            }
        }
        let clock =
            std::time::UNIX_EPOCH.elapsed().map_or(1, |time| u64::from(time.subsec_nanos()));
        Ok(Self {
            seed: number("FAKE_EFA_SEED", clock, 0..=u64::MAX)?,
            nics: u8::try_from(number("FAKE_EFA_NICS", 4, 0..=32)?).unwrap_or(0),
            direct,
            efa,
            max_rma: size("FAKE_EFA_MAX_RMA", 1 << 20, 1..=1 << 30)?,
            tx_size: size("FAKE_EFA_TX_SIZE", 64, 1..=1 << 15)?,
            rx_size: size("FAKE_EFA_RX_SIZE", 128, 1..=1 << 15)?,
            delay: Duration::from_micros(number("FAKE_EFA_DELAY_US", 200, 0..=10_000_000)?),
            late: Duration::from_micros(number("FAKE_EFA_LATE_US", 0, 0..=10_000_000)?),
            late_writes: Duration::from_micros(number(
                "FAKE_EFA_LATE_WRITES_US",
                0,
                0..=10_000_000,
            )?),
            dead: Duration::from_millis(number("FAKE_EFA_DEAD_MS", 300, 0..=600_000)?),
            silent: Duration::from_millis(number("FAKE_EFA_SILENT_MS", 30_000, 100..=600_000)?),
            early_ack: number("FAKE_EFA_EARLY_ACK", 1, 0..=1)? == 1,
            emulated_write: number("FAKE_EFA_EMULATED_WRITE", 0, 0..=1)? == 1,
            hmem: number("FAKE_EFA_HMEM", 1, 0..=1)? == 1
                && variable("FI_HMEM").as_deref() != Some("system"),
            pin_until: variable("FAKE_EFA_PIN_UNTIL").map(PathBuf::from),
            breaks: variable("FAKE_EFA_BREAKS").map(PathBuf::from),
            unsolicited: number("FAKE_EFA_UNSOLICITED", 1, 0..=1)? == 1,
        })
    }
}

/// Returns the process's configuration, or what is wrong with the environment.
pub(crate) fn get() -> Result<&'static Config, &'static str> {
    static CONFIG: OnceLock<Result<Config, String>> = OnceLock::new();
    CONFIG
        .get_or_init(|| {
            let config = Config::read(|name| std::env::var(name).ok());
            match &config {
                Ok(config) => crate::log::event("start", &[("seed", config.seed)]),
                // Nobody else can say it: the caller learns a number only.
                Err(error) => eprintln!("fake-efa: {error}"),
            }
            config
        })
        .as_ref()
        .map_err(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_documented_and_nonsense_is_refused() {
        let config = Config::read(|_| None).unwrap();
        assert_eq!((config.nics, config.max_rma, config.tx_size), (4, 1 << 20, 64));
        assert!(config.direct && !config.efa && config.unsolicited && !config.emulated_write);
        let hmem = |value: &'static str| {
            Config::read(move |name| (name == "FI_HMEM").then(|| value.into())).unwrap().hmem
        };
        assert!(config.hmem && hmem("cuda") && !hmem("system"));
        let both =
            Config::read(|name| (name == "FAKE_EFA_FABRICS").then(|| "efa,efa-direct".into()))
                .unwrap();
        assert!(both.direct && both.efa);
        for (name, value) in
            [("FAKE_EFA_NICS", "many"), ("FAKE_EFA_TX_SIZE", "0"), ("FAKE_EFA_FABRICS", "tcp")]
        {
            let error = Config::read(|asked| (asked == name).then(|| value.into())).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
