//! Rows as a table for a terminal.

use super::Row;
use comfy_table::{CellAlignment, Table, presets};
use std::fmt::Write as _;

/// `bytes` in the largest binary unit of which it is a whole number, else with one decimal.
#[must_use]
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    for (unit, name) in UNITS {
        if bytes >= unit {
            return if bytes.is_multiple_of(unit) {
                format!("{} {name}", bytes / unit)
            } else {
                format!("{:.1} {name}", bytes as f64 / unit as f64)
            };
        }
    }
    format!("{bytes} B")
}

/// Three significant digits, no exponent: enough to compare, few enough to read.
pub(crate) fn figure(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

fn size_text(row: &Row) -> String {
    let shape = &row.shape;
    match (shape.pages, shape.page_bytes, shape.bytes) {
        (Some(pages), Some(page_bytes), _) => format!("{pages} x {}", bytes_text(page_bytes)),
        (_, _, Some(bytes)) => bytes_text(bytes),
        _ => "-".to_owned(),
    }
}

/// The rows as text: median, p99, spread, and the baseline beside them.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "bench", "nics", "size", "depth", "median", "p99", "spread", "baseline", "ratio", "bytes",
    ]);
    for row in rows {
        let median = match (row.gb_per_s, row.mops, row.half_rtt_us) {
            (_, Some(mops), _) if row.shape.bench == "rate" => format!("{} Mop/s", figure(mops)),
            (Some(gb), _, _) => format!("{} GB/s", figure(gb)),
            (_, Some(mops), _) => format!("{} Mop/s", figure(mops)),
            (_, _, Some(us)) => format!("{} us", figure(us)),
            _ => "-".to_owned(),
        };
        let baseline = match (row.baseline_gb_per_s, row.baseline_half_rtt_us) {
            (Some(gb), _) => match (row.shape.bench, row.mops, row.ratio) {
                ("rate", Some(mops), Some(ratio)) => format!("{} Mop/s", figure(mops / ratio)),
                _ => format!("{} GB/s", figure(gb)),
            },
            (_, Some(us)) => format!("{} us", figure(us)),
            _ => "-".to_owned(),
        };
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        table.add_row([
            row.shape.bench.to_owned(),
            row.shape.nics.to_string(),
            size_text(row),
            row.shape.depth.to_string(),
            median,
            or_dash(row.p99_us.map(|us| format!("{} us", figure(us)))),
            or_dash(row.spread.map(|share| format!("{:.0} %", share * 100.0))),
            baseline,
            or_dash(row.ratio.map(|ratio| format!("{ratio:.2}"))),
            if row.verified { "verified" } else { "WRONG" }.to_owned(),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = trim_lines(&table.to_string());
    for row in rows {
        if let Some(ratio) = row.early_ratio {
            let what = format!("{} {}", row.shape.bench, size_text(row));
            let _ = write!(
                text,
                "\n{what}: in the baseline above a write is done when its bytes are there, as in ours; where \
                 the kernel having them is enough, the ratio is {ratio:.2}"
            );
        }
    }
    text
}

fn trim_lines(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::samples;

    #[test]
    fn sizes_read_as_a_person_would_write_them() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            ((5 << 30) + 1, "5.0 GiB"),
            (1 << 41, "2 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(bytes_text(bytes), text);
        }
    }

    #[test]
    fn a_figure_has_three_digits() {
        for (value, text) in [(123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123")] {
            assert_eq!(figure(value), text);
        }
    }

    #[test]
    fn every_row_shows_its_figures_and_a_wrong_one_shouts() {
        let text = table(&samples());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 1 + samples().len(), "{text}");
        for needle in ["10.0 GB/s", "20.0 GB/s", "400 us", "0.50", "verified"] {
            assert!(lines[1].contains(needle), "{needle} in {}", lines[1]);
        }
        assert!(lines[3].contains("500 x 3.9 KiB"), "{}", lines[3]);
        assert!(lines[4].contains("2.00 us") && lines[4].contains("1.00 us"), "{}", lines[4]);
        assert!(lines[5].contains("WRONG"), "{}", lines[5]);
    }
}
