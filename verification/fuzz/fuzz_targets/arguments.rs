//! The command line: sizes, addresses, and which rows a benchmark is to measure.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use clap::{Parser, ValueEnum};
use immwire_cli::args::{Cli, Command};
use immwire_cli::bench::plan::{What, Wish, parse_bytes};
use libfuzzer_sys::fuzz_target;

/// The most memory that a row may take on one side.
const MEMORY_MAX: u128 = 64 << 30;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        size(text);
        let line: Vec<&str> = text.split('\n').collect();
        command(&line);
    }
    if let Ok(asked) = Asked::arbitrary(&mut Unstructured::new(bytes)) {
        asked.check();
    }
});

/// A size is digits, and at most one unit: nothing else is one.
fn size(text: &str) {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "ki" | "kb" | "kib" => Some(10),
        "m" | "mi" | "mb" | "mib" => Some(20),
        "g" | "gi" | "gb" | "gib" => Some(30),
        _ => None,
    };
    let exact =
        number.parse::<u64>().ok().zip(shift).map(|(number, shift)| u128::from(number) << shift);
    let expected = exact.and_then(|exact| u64::try_from(exact).ok());
    assert_eq!(parse_bytes(text).ok(), expected, "{text:?}");
}

/// What is accepted keeps to the bounds that the help promises.
fn command(line: &[&str]) {
    let Ok(cli) = Cli::try_parse_from(std::iter::once(&"immwire").chain(line)) else { return };
    match cli.command {
        Command::Bench(args) => {
            assert!((1..=8).contains(&args.nics));
            assert!(
                args.connect
                    .iter()
                    .all(|address| address.to_string().parse().as_ref() == Ok(address))
            );
            assert!(args.connect.is_empty() || args.what.is_some());
        }
        Command::Push(args) => {
            assert!((1..=8).contains(&args.nics) && (1..=86_400).contains(&args.patience));
            assert!(!args.paths.is_empty());
            assert_eq!(args.address.to_string().parse().as_ref(), Ok(&args.address));
        }
        Command::Recv(args) => {
            assert!((1..=8).contains(&args.nics) && (1..=86_400).contains(&args.patience));
        }
        _ => {}
    }
}

#[derive(Debug, Arbitrary)]
struct Asked {
    what: Option<u8>,
    sizes: Vec<u64>,
    pages: Option<u32>,
    page_lines: Option<u64>,
    depth: Option<u32>,
    peers: Option<u32>,
    seconds: Option<f64>,
    processors: u8,
    /// Whether numbers are folded into what may be possible.
    fold: bool,
    gpus: bool,
}

impl Asked {
    /// Every row that is planned is possible.
    fn check(&self) {
        let fold = |number: u64, end: u64| if self.fold { number % end + 1 } else { number };
        let small = |number: u32, end: u64| u32::try_from(fold(number.into(), end)).unwrap_or(0);
        let whats = What::value_variants();
        let wish = Wish {
            what: self.what.map(|what| whats[usize::from(what) % whats.len()]),
            sizes: self.sizes.iter().map(|size| fold(*size, 1 << 34)).collect(),
            pages: self.pages.map(|pages| small(pages, 1 << 24)),
            page_bytes: self.page_lines.map(|lines| fold(lines, 1 << 27).wrapping_mul(8)),
            depth: self.depth.map(|depth| small(depth, 512)),
            peers: self.peers.map(|peers| small(peers, 64)),
            mode: None,
            seconds: self.seconds,
            gpus: self.gpus,
            processors: self.processors.into(),
        };
        let Ok(cases) = wish.plan() else { return };
        assert!(!cases.is_empty());
        for case in cases {
            let bytes = u128::from(case.bytes);
            let in_flight = if case.pages.is_some() { 1 } else { u128::from(case.depth) };
            assert!(bytes * in_flight <= MEMORY_MAX, "{case:?}");
            assert!((1..=512).contains(&case.depth) && (1..=64).contains(&case.peers), "{case:?}");
            if let Some((pages, page_bytes)) = case.pages {
                assert_eq!(bytes, u128::from(pages) * u128::from(page_bytes));
            }
            assert!(case.bytes > 0 || case.what == What::Barrier);
            assert!((50..=3_600_000).contains(&case.time.as_millis()));
        }
    }
}
