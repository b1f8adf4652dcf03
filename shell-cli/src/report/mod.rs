//! What a benchmark found: rows, and three ways to show them.
//!
//! A [`Row`] is made of times per transfer, ours and the baseline's, measured in one run. This module
//! measures nothing and knows no engine.
//!
//! # Invariants
//!
//! `ratio > 1` is always better than the baseline, for rates as for times; a field that does not
//! apply to a row is null, never zero. The tests check both.

mod plot;
pub mod stats;
pub(crate) mod table;

pub use plot::{PlotError, plot};
pub use table::{bytes_text, table};

use serde::Serialize;
use stats::summarise;

/// What was run: the left half of a row.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Shape {
    /// `write`, `pages`, `latency`, `rate`, `scatter` or `barrier`.
    pub bench: &'static str,
    /// Which provider moved the bytes.
    pub provider: &'static str,
    /// libfabric's provider, if it is libfabric: `tcp`, `efa`, ...
    pub fabric: Option<String>,
    /// NICs on the sending side.
    pub nics: u8,
    /// Bytes of one transfer, all its pages or peers together; null for a barrier.
    pub bytes: Option<u64>,
    /// Pages of one transfer, if it is paged.
    pub pages: Option<u64>,
    /// Bytes of a page, if it is paged.
    pub page_bytes: Option<u64>,
    /// Transfers in flight at once.
    pub depth: u32,
}

/// One line of the result. Serialises to one flat JSON object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What was run.
    #[serde(flatten)]
    pub shape: Shape,
    /// Payload bytes per second / 1e9, at the median.
    pub gb_per_s: Option<f64>,
    /// Writes, or pages, per microsecond, at the median.
    pub mops: Option<f64>,
    /// Microseconds one way at the median (half a round trip); of a barrier, microseconds for one.
    pub half_rtt_us: Option<f64>,
    /// Microseconds that 99 % of the samples do not exceed: one way, one barrier, or one transfer.
    pub p99_us: Option<f64>,
    /// What the baseline reached, for rows that have `gb_per_s`.
    pub baseline_gb_per_s: Option<f64>,
    /// What the baseline took, for rows that have `half_rtt_us`.
    pub baseline_half_rtt_us: Option<f64>,
    /// Ours against the baseline; above 1 is better than the baseline.
    pub ratio: Option<f64>,
    /// Ours against the baseline whose writes are done when the kernel has their bytes, while those of
    /// `ratio` are done when they are there, as ours are; null if both are within 5 %, or one and the same.
    pub early_ratio: Option<f64>,
    /// `(p95 - p5) / median` of our samples; null if there are fewer than [`stats::SAMPLES_MIN`].
    pub spread: Option<f64>,
    /// Whether every byte that was looked at was the right one, and every count exact.
    pub verified: bool,
}

const MICROS: f64 = 1e6;

/// How the times of a row are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Each sample is the time of one transfer; the row shows rates.
    Rate,
    /// Each sample is the time one way, or of one barrier; the row shows times.
    Time,
}

impl Row {
    /// A row of `ours`, beside `baseline` if there is one: seconds for each transfer, at least one
    /// sample. Without samples every figure is null.
    #[must_use]
    pub fn new(
        shape: Shape,
        measure: Measure,
        ours: &[f64],
        baseline: Option<&[f64]>,
        verified: bool,
    ) -> Self {
        let summary = summarise(ours);
        let base_s = baseline.and_then(summarise).map(|summary| summary.median);
        let median_s = summary.map(|summary| summary.median);
        let rate = measure == Measure::Rate;
        let operations = shape.pages.unwrap_or(1) as f64;
        let gb = |seconds: f64| shape.bytes.map(|bytes| bytes as f64 / seconds / 1e9);
        let us = |seconds: f64| seconds * MICROS;
        Self {
            gb_per_s: median_s.filter(|_| rate).and_then(gb),
            mops: median_s.filter(|_| rate).map(|seconds| operations / us(seconds)),
            half_rtt_us: median_s.filter(|_| !rate).map(us),
            p99_us: summary.map(|summary| us(summary.p99)),
            baseline_gb_per_s: base_s.filter(|_| rate).and_then(gb),
            baseline_half_rtt_us: base_s.filter(|_| !rate).map(us),
            ratio: median_s.zip(base_s).map(|(ours, base)| base / ours),
            early_ratio: None,
            spread: summary.and_then(|summary| summary.spread),
            verified,
            shape,
        }
    }

    /// The same row, beside a baseline of another form too: seconds for each transfer.
    #[must_use]
    pub fn with_early(mut self, ours: &[f64], early: &[f64]) -> Self {
        const SAME: f64 = 0.05;
        let medians = summarise(ours).zip(summarise(early));
        let ratio = medians.map(|(ours, early)| early.median / ours.median);
        self.early_ratio =
            ratio.filter(|early| self.ratio.is_none_or(|ratio| (early / ratio - 1.0).abs() > SAME));
        self
    }

    /// The same row with the 99th percentile of `samples`, where single operations were timed apart
    /// from the batches that the median is of. Unchanged if there are none.
    #[must_use]
    pub fn with_p99_of(mut self, samples: &[f64]) -> Self {
        if let Some(summary) = summarise(samples) {
            self.p99_us = Some(summary.p99 * MICROS);
        }
        self
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One row of each kind, for the tests of the renderers too.
    pub(crate) fn samples() -> Vec<Row> {
        let shape = Shape {
            bench: "write",
            provider: "shm",
            nics: 1,
            bytes: Some(2_000_000),
            depth: 4,
            ..Shape::default()
        };
        let pages =
            Shape { bench: "pages", pages: Some(500), page_bytes: Some(4000), ..shape.clone() };
        let latency = Shape { bench: "latency", bytes: Some(8), depth: 1, ..shape.clone() };
        let barrier = Shape { bench: "barrier", bytes: None, depth: 1, ..shape.clone() };
        vec![
            Row::new(shape.clone(), Measure::Rate, &[2e-4, 1e-4, 4e-4], Some(&[1e-4]), true),
            Row::new(
                Shape { bytes: Some(4_000_000), ..shape },
                Measure::Rate,
                &[4e-4],
                Some(&[2e-4]),
                true,
            ),
            Row::new(pages, Measure::Rate, &[1e-3], Some(&[2e-3]), true),
            Row::new(latency, Measure::Time, &[2e-6], Some(&[1e-6]), true),
            Row::new(barrier, Measure::Time, &[5e-6], None, false),
        ]
    }

    #[test]
    fn a_ratio_above_one_is_better_for_rates_and_times() {
        let rows = samples();
        let ratios: Vec<_> = rows.iter().map(|row| row.ratio).collect();
        assert_eq!(ratios, [Some(0.5), Some(0.5), Some(2.0), Some(0.5), None]);
        assert_eq!(rows[0].gb_per_s, Some(10.0));
        assert_eq!(rows[0].baseline_gb_per_s, Some(20.0));
        assert_eq!(rows[2].mops, Some(0.5));
        assert_eq!(rows[3].half_rtt_us, Some(2.0));
        assert_eq!(rows[3].baseline_half_rtt_us, Some(1.0));
    }

    #[test]
    fn what_does_not_apply_is_null_and_every_field_is_there() {
        let fields = [
            "bench",
            "provider",
            "fabric",
            "nics",
            "bytes",
            "pages",
            "page_bytes",
            "depth",
            "gb_per_s",
            "mops",
            "half_rtt_us",
            "p99_us",
            "baseline_gb_per_s",
            "baseline_half_rtt_us",
            "ratio",
            "early_ratio",
            "spread",
            "verified",
        ];
        for row in samples() {
            let json = serde_json::to_value(&row).unwrap();
            let object = json.as_object().unwrap();
            assert_eq!(object.len(), fields.len());
            for field in fields {
                assert!(object.contains_key(field), "{field}");
            }
            let time = matches!(row.shape.bench, "latency" | "barrier");
            assert_eq!(object["gb_per_s"].is_null(), time);
            assert_eq!(object["half_rtt_us"].is_null(), !time);
            assert_eq!(object["pages"].is_null(), row.shape.bench != "pages");
        }
        let barrier = serde_json::to_value(&samples()[4]).unwrap();
        assert!(barrier["bytes"].is_null() && barrier["ratio"].is_null());
        assert_eq!(barrier["verified"], false);
    }

    #[test]
    fn another_form_of_the_baseline_is_told_of_if_it_makes_a_difference() {
        let row = || Row::new(Shape::default(), Measure::Rate, &[2.0], Some(&[1.0]), true);
        assert_eq!(row().with_early(&[2.0], &[0.96]).early_ratio, None);
        assert_eq!(row().with_early(&[2.0], &[1.04]).early_ratio, None);
        assert_eq!(row().with_early(&[2.0], &[0.9]).early_ratio, Some(0.45));
        assert_eq!(row().with_early(&[2.0], &[]).early_ratio, None);
    }

    #[test]
    fn a_row_without_samples_claims_nothing() {
        let row = Row::new(Shape::default(), Measure::Rate, &[], Some(&[1.0]), true);
        assert_eq!((row.gb_per_s, row.p99_us, row.ratio), (None, None, None));
        assert_eq!(row.clone().with_p99_of(&[]), row);
        assert_eq!(row.with_p99_of(&[1.0, 2.0]).p99_us, Some(2e6));
    }
}
