//! Which rows are to be measured, from what was asked. Pure.

use crate::motor::Mode;
use clap::ValueEnum;
use std::time::Duration;

/// A benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Contiguous writes.
    Write,
    /// Paged writes: shuffled pages, each to a place of its own.
    Pages,
    /// Ping-pong of small writes, one in flight.
    Latency,
    /// Small writes, many in flight.
    Rate,
    /// One write to each of several peers.
    Scatter,
    /// Barriers among several processes.
    Barrier,
}

impl What {
    /// As in a row.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Pages => "pages",
            Self::Latency => "latency",
            Self::Rate => "rate",
            Self::Scatter => "scatter",
            Self::Barrier => "barrier",
        }
    }
}

/// One row to be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// Which benchmark.
    pub what: What,
    /// Bytes of one write; to each peer, for a scatter; 0 for a barrier.
    pub bytes: u64,
    /// Pages of a paged write, and bytes of each.
    pub pages: Option<(u32, u64)>,
    /// Transfers in flight.
    pub depth: u32,
    /// Peers besides this process.
    pub peers: u32,
    /// How engines move.
    pub mode: Mode,
    /// How long to measure.
    pub time: Duration,
}

/// What was asked; `None` where nothing was.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wish {
    /// Which benchmark; all if none.
    pub what: Option<What>,
    /// Sizes of writes.
    pub sizes: Vec<u64>,
    /// Pages of a paged write.
    pub pages: Option<u32>,
    /// Bytes of a page.
    pub page_bytes: Option<u64>,
    /// Transfers in flight.
    pub depth: Option<u32>,
    /// Peers besides this process.
    pub peers: Option<u32>,
    /// How engines move.
    pub mode: Option<Mode>,
    /// Seconds a row.
    pub seconds: Option<f64>,
    /// Whether GPUs write.
    pub gpus: bool,
    /// Processors there are.
    pub processors: u32,
}

/// Why what was asked cannot be measured. The user's to correct.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A number is too small or too big.
    #[error("{what} is {found}; it must be {allowed}")]
    OutOfRange {
        /// Which.
        what: &'static str,
        /// What was given.
        found: u64,
        /// What is possible.
        allowed: &'static str,
    },
    /// The time is no time.
    #[error("--seconds {0} is no time to measure in; it must be 0.05 to 3600")]
    Seconds(f64),
    /// The benchmark looks at its bytes each turn, or is of many peers.
    #[error("{bench} is not measured between GPUs: only write, pages and rate are")]
    NotOnGpus {
        /// Which benchmark.
        bench: &'static str,
    },
    /// An option has no meaning for the benchmark.
    #[error("--{option} has no meaning for {bench}")]
    NoMeaning {
        /// Which option.
        option: &'static str,
        /// For which benchmark.
        bench: &'static str,
    },
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The number of a turn of the ping-pong, in front of each message.
const TURN_BYTES: u64 = 8;
/// The most memory that one case takes on one side.
const MEMORY_MAX: u64 = 64 << 30;

impl Wish {
    /// The rows to be measured.
    ///
    /// # Errors
    ///
    /// [`PlanError`].
    pub fn plan(&self) -> Result<Vec<Case>, PlanError> {
        let summary = self.what.is_none();
        let seconds = self.seconds.unwrap_or(if summary { 1.5 } else { 2.0 });
        if !(0.05..=3600.0).contains(&seconds) {
            return Err(PlanError::Seconds(seconds));
        }
        self.check_ranges()?;
        let time = Duration::from_secs_f64(seconds);
        let benches = self.what.map_or_else(|| What::value_variants().to_vec(), |what| vec![what]);
        let mut cases = Vec::new();
        for what in benches {
            if self.gpus && !matches!(what, What::Write | What::Pages | What::Rate) {
                if summary {
                    continue;
                }
                return Err(PlanError::NotOnGpus { bench: what.name() });
            }
            self.check_meaning(what)?;
            for (bytes, pages) in self.shapes(what, summary) {
                let case = self.case(what, bytes, pages, time);
                let each = if what == What::Pages {
                    case.bytes
                } else {
                    case.bytes * u64::from(case.depth)
                };
                if each > MEMORY_MAX {
                    return Err(PlanError::OutOfRange {
                        what: "size x depth",
                        found: each,
                        allowed: "at most 64 GiB",
                    });
                }
                cases.push(case);
            }
        }
        Ok(cases)
    }

    fn check_ranges(&self) -> Result<(), PlanError> {
        let within = |what, found: Option<u64>, least, most, allowed| match found {
            Some(found) if !(least..=most).contains(&found) => {
                Err(PlanError::OutOfRange { what, found, allowed })
            }
            _ => Ok(()),
        };
        for size in &self.sizes {
            within("--size", Some(*size), 1, 64 << 30, "1 byte to 64 GiB")?;
            if self.what == Some(What::Latency) {
                let allowed = "8 bytes or more: by them it is known which turn came";
                within("--size of latency", Some(*size), TURN_BYTES, u64::MAX, allowed)?;
            }
        }
        within("--pages", self.pages.map(u64::from), 1, 1 << 24, "1 to 16777216")?;
        within("--depth", self.depth.map(u64::from), 1, 512, "1 to 512")?;
        within("--peers", self.peers.map(u64::from), 1, 64, "1 to 64")?;
        within("--page-size", self.page_bytes, 8, 1 << 30, "8 bytes to 1 GiB")?;
        match self.page_bytes {
            Some(found) if !found.is_multiple_of(8) => Err(PlanError::OutOfRange {
                what: "--page-size",
                found,
                allowed: "a multiple of 8",
            }),
            _ => Ok(()),
        }
    }

    /// In a summary an option is for the benchmarks it has a meaning for.
    fn check_meaning(&self, what: What) -> Result<(), PlanError> {
        use What::{Barrier, Latency, Pages, Scatter};
        let given = [
            ("size", !self.sizes.is_empty(), !matches!(what, Pages | Barrier)),
            ("pages", self.pages.is_some(), what == Pages),
            ("page-size", self.page_bytes.is_some(), what == Pages),
            ("depth", self.depth.is_some(), !matches!(what, Latency | Barrier)),
            ("peers", self.peers.is_some(), matches!(what, Scatter | Barrier)),
        ];
        match given.into_iter().find(|(_, given, meant)| self.what.is_some() && *given && !meant) {
            Some((option, ..)) => Err(PlanError::NoMeaning { option, bench: what.name() }),
            None => Ok(()),
        }
    }

    fn shapes(&self, what: What, summary: bool) -> Vec<(u64, Option<(u32, u64)>)> {
        let paged = |pages: u32, page_bytes: u64| {
            (u64::from(pages) * page_bytes, Some((pages, page_bytes)))
        };
        let sizes: &[u64] = match (what, summary) {
            (What::Write, true) => &[64 * KIB, MIB, 64 * MIB],
            (What::Write, false) => {
                &[4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
            }
            (What::Latency, true) => &[8],
            (What::Latency, false) => &[8, 64, 512, 4 * KIB],
            (What::Rate, true) => &[64],
            (What::Rate, false) => &[8, 64, 512, 4 * KIB],
            (What::Scatter, true) => &[64 * KIB],
            (What::Scatter, false) => &[4 * KIB, 64 * KIB, MIB],
            (What::Barrier, _) => &[0],
            (What::Pages, _) => {
                return match (self.pages, self.page_bytes) {
                    (None, None) => vec![paged(1024, 16 * KIB), paged(40_000, 4 * KIB)],
                    (pages, page_bytes) => {
                        vec![paged(pages.unwrap_or(1024), page_bytes.unwrap_or(16 * KIB))]
                    }
                };
            }
        };
        // In a summary a size is for the writes.
        let given =
            !self.sizes.is_empty() && (!summary || what == What::Write) && what != What::Barrier;
        let sizes = if given { &self.sizes } else { sizes };
        sizes.iter().map(|bytes| (*bytes, None)).collect()
    }

    fn case(&self, what: What, bytes: u64, pages: Option<(u32, u64)>, time: Duration) -> Case {
        let (depth, peers) = match what {
            // In flight: some MiB, so that the engine is never idle and the caches are not all lost.
            What::Write => (u32::try_from((4 * MIB / bytes.max(1)).clamp(2, 16)).unwrap_or(2), 1),
            What::Pages => (2, 1),
            What::Latency => (1, 1),
            What::Rate => (64, 1),
            What::Scatter => (4, 4),
            What::Barrier => (1, 3),
        };
        let alone = matches!(what, What::Latency | What::Barrier);
        let depth = self.depth.filter(|_| !alone).unwrap_or(depth);
        let many = matches!(what, What::Scatter | What::Barrier);
        let peers = self.peers.filter(|_| many).unwrap_or(peers);
        // Who polls needs a processor; with fewer than processes, pollers wait for each other.
        let enough = peers < self.processors;
        let mode = self.mode.unwrap_or(if enough { Mode::Polled } else { Mode::Thread });
        Case { what, bytes, pages, depth, peers, mode, time }
    }
}

/// Bytes from text such as `64K`, `1MiB`, `4096`; units are binary.
///
/// # Errors
///
/// What is wrong, for the user.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, unit) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let number: u64 =
        digits.parse().map_err(|_| format!("\"{text}\" is no size; write 4096, 64K or 1MiB"))?;
    let unit = unit.trim();
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kb" | "kib" => 10,
        "m" | "mi" | "mb" | "mib" => 20,
        "g" | "gi" | "gb" | "gib" => 30,
        _ => return Err(format!("\"{unit}\" is no unit; use K, M or G")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too big"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(what: Option<What>) -> Wish {
        Wish { what, processors: 8, ..Wish::default() }
    }

    #[test]
    fn a_summary_has_every_bench_and_fits_in_half_a_minute() {
        let cases = wish(None).plan().unwrap();
        for what in What::value_variants() {
            assert!(cases.iter().any(|case| case.what == *what), "{what:?}");
        }
        let time: Duration = cases.iter().map(|case| case.time).sum();
        assert!(time < Duration::from_secs(20), "{time:?}");
        let paged: Vec<_> = cases.iter().filter_map(|case| case.pages).collect();
        assert_eq!(paged, [(1024, 16384), (40_000, 4096)]);
    }

    #[test]
    fn what_is_given_is_used() {
        let asked = Wish {
            sizes: vec![1000, 5],
            depth: Some(3),
            mode: Some(Mode::Thread),
            seconds: Some(0.5),
            ..wish(Some(What::Write))
        };
        let cases = asked.plan().unwrap();
        let sizes: Vec<_> = cases.iter().map(|case| case.bytes).collect();
        assert_eq!(sizes, [1000, 5]);
        assert!(cases.iter().all(|case| case.depth == 3 && case.mode == Mode::Thread));
        assert_eq!(cases[0].time, Duration::from_millis(500));
        let asked = Wish { page_bytes: Some(64), ..wish(Some(What::Pages)) };
        assert_eq!(asked.plan().unwrap()[0].pages, Some((1024, 64)));
    }

    #[test]
    fn between_gpus_there_are_writes_pages_and_rates() {
        let all = Wish { gpus: true, ..wish(None) }.plan().unwrap();
        for what in What::value_variants() {
            let measured = matches!(what, What::Write | What::Pages | What::Rate);
            assert_eq!(all.iter().any(|case| case.what == *what), measured, "{what:?}");
            let alone = Wish { gpus: true, ..wish(Some(*what)) }.plan();
            assert_eq!(alone.is_ok(), measured, "{what:?}");
        }
    }

    #[test]
    fn pollers_are_never_more_than_processors_unless_asked_for() {
        for (processors, mode) in [(1, Mode::Thread), (4, Mode::Thread), (5, Mode::Polled)] {
            let asked = Wish { processors, ..wish(Some(What::Scatter)) };
            assert!(asked.plan().unwrap().iter().all(|case| case.mode == mode), "{processors}");
        }
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_the_reason() {
        let range = |asked: Wish| matches!(asked.plan(), Err(PlanError::OutOfRange { .. }));
        let write = || wish(Some(What::Write));
        assert!(range(Wish { sizes: vec![0], ..write() }));
        for size in 0..16 {
            let latency = Wish { sizes: vec![64, size], ..wish(Some(What::Latency)) };
            assert_eq!(range(latency), size < 8, "{size}");
        }
        assert!(range(Wish { depth: Some(0), ..write() }));
        assert!(range(Wish { sizes: vec![64 << 30], depth: Some(2), ..write() }));
        assert!(range(Wish { page_bytes: Some(12), ..wish(Some(What::Pages)) }));
        assert!(range(Wish { pages: Some(0), ..wish(Some(What::Pages)) }));
        assert!(range(Wish { peers: Some(65), ..wish(Some(What::Barrier)) }));
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY, 3601.0] {
            assert!(matches!(
                Wish { seconds: Some(seconds), ..write() }.plan(),
                Err(PlanError::Seconds(_))
            ));
        }
        let no_meaning = |asked: Wish| matches!(asked.plan(), Err(PlanError::NoMeaning { .. }));
        assert!(no_meaning(Wish { pages: Some(1), ..write() }));
        assert!(no_meaning(Wish { sizes: vec![1], ..wish(Some(What::Barrier)) }));
        assert!(no_meaning(Wish { peers: Some(2), ..wish(Some(What::Latency)) }));
        assert!(Wish { pages: Some(1), sizes: vec![1], ..wish(None) }.plan().is_ok());
    }

    #[test]
    fn sizes_are_read_in_binary_units() {
        let good = [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65536),
            ("1MiB", MIB),
            ("2 gb", 2 << 30),
            ("3kib", 3072),
        ];
        for (text, bytes) in good {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        // One sign, or one unit, too many: none of them is a size.
        let too_many = ["+5", "1Kbb", "1Kiib", "1bb", "1i", "1Kbi"];
        let others = ["", "K", "-1", "1.5M", "1T", "1Kx", "99999999999G", "K1"];
        for bad in others.into_iter().chain(too_many) {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
