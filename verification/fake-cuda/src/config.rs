//! What the environment says of the machine. Read once in a process, by `cuInit`.
//!
//! Nothing here switches a rule off.

use std::sync::OnceLock;

/// GPUs at most: [`crate::memory`] keeps a bit for each in a word.
pub(crate) const MOST_GPUS: u8 = 32;
/// SMs of a GPU: few, for kernels run as many threads on each as a GPU would.
pub(crate) const SMS: u32 = 8;

/// The machine, as this process sees it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// `IMMWIRE_FAKE_CUDA_GPUS` (2): GPUs of the machine, numbered from 0 in all its processes.
    pub(crate) gpus: u8,
    /// `CUDA_VISIBLE_DEVICES` (all): the GPUs that this process has, in its own order. A list of numbers; it ends before
    /// the first that is none.
    pub(crate) visible: Vec<u8>,
    /// `IMMWIRE_FAKE_CUDA_NO_PEER` (0): 1 if no GPU reaches another's memory.
    pub(crate) peers: bool,
    /// `IMMWIRE_FAKE_CUDA_NO_DMA_BUF` (0): 1 if no DMA-BUF can be had of a GPU's memory.
    pub(crate) dma_buf: bool,
    /// `IMMWIRE_FAKE_CUDA_NO_HOST_POINTERS` (0): 1 if registered host memory is not said to be at the CPU's address for GPUs.
    pub(crate) host_pointers: bool,
    /// `IMMWIRE_FAKE_CUDA_UNORDERED` (0): 1 if what NICs write is seen after a flush only.
    pub(crate) unordered: bool,
    /// `IMMWIRE_FAKE_CUDA_NO_GDRDRV` (0): 1 if GDRCopy has no kernel module.
    pub(crate) gdrdrv: bool,
    /// `IMMWIRE_FAKE_CUDA_SEED` (none): what delays follow from. Without one there are none; the order of pieces is
    /// mixed all the same.
    pub(crate) seed: Option<u64>,
}

impl Config {
    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let number = |name: &str, most: u64| match variable(name) {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(value) if value <= most => Ok(Some(value)),
                _ => Err(format!("{name}={text}: not a number up to {most}")),
            },
        };
        let gpus = number("IMMWIRE_FAKE_CUDA_GPUS", u64::from(MOST_GPUS))?;
        let gpus = gpus.and_then(|n| u8::try_from(n).ok()).unwrap_or(2);
        let visible = match variable("CUDA_VISIBLE_DEVICES") {
            None => (0..gpus).collect(),
            Some(list) => {
                list.split(',').map_while(|n| n.trim().parse().ok().filter(|&n| n < gpus)).collect()
            }
        };
        let is = |name: &str| number(name, 1).map(|value| value == Some(1));
        Ok(Self {
            gpus,
            visible,
            peers: !is("IMMWIRE_FAKE_CUDA_NO_PEER")?,
            dma_buf: !is("IMMWIRE_FAKE_CUDA_NO_DMA_BUF")?,
            host_pointers: !is("IMMWIRE_FAKE_CUDA_NO_HOST_POINTERS")?,
            unordered: is("IMMWIRE_FAKE_CUDA_UNORDERED")?,
            gdrdrv: !is("IMMWIRE_FAKE_CUDA_NO_GDRDRV")?,
            seed: number("IMMWIRE_FAKE_CUDA_SEED", u64::MAX)?,
        })
    }
}

/// The process's configuration, or what is wrong with the environment.
pub(crate) fn get() -> Result<&'static Config, &'static str> {
    static CONFIG: OnceLock<Result<Config, String>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| Config::read(|name| std::env::var(name).ok()));
    config.as_ref().map_err(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::Config;

    fn read(variables: &[(&str, &str)]) -> Result<Config, String> {
        Config::read(|name| variables.iter().find(|v| v.0 == name).map(|v| v.1.to_owned()))
    }

    #[test]
    fn defaults_are_those_documented_and_nonsense_is_refused() {
        let expected = Config {
            gpus: 2,
            visible: vec![0, 1],
            peers: true,
            dma_buf: true,
            host_pointers: true,
            unordered: false,
            gdrdrv: true,
            seed: None,
        };
        assert_eq!(read(&[]), Ok(expected));
        let visible = |list| {
            read(&[("IMMWIRE_FAKE_CUDA_GPUS", "4"), ("CUDA_VISIBLE_DEVICES", list)])
                .unwrap()
                .visible
        };
        assert_eq!(visible("3, 1"), [3, 1]);
        assert_eq!(visible("2,4,1"), [2]);
        assert_eq!(visible(""), []);
        for (name, value) in [
            ("IMMWIRE_FAKE_CUDA_GPUS", "33"),
            ("IMMWIRE_FAKE_CUDA_NO_PEER", "yes"),
            ("IMMWIRE_FAKE_CUDA_NO_DMA_BUF", "2"),
            ("IMMWIRE_FAKE_CUDA_NO_HOST_POINTERS", "?"),
            ("IMMWIRE_FAKE_CUDA_UNORDERED", "no"),
            ("IMMWIRE_FAKE_CUDA_NO_GDRDRV", "off"),
            ("IMMWIRE_FAKE_CUDA_SEED", "-1"),
        ] {
            assert!(read(&[(name, value)]).unwrap_err().contains(name));
        }
    }
}
