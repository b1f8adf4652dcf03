//! Order statistics of measured times.
//!
//! Pure arithmetic on slices of seconds; nothing here measures. Times are used throughout, never
//! rates, so that "p99" always means the slow end.
//!
//! # Invariants
//!
//! A quantile is one of the samples (nearest rank, no interpolation), so it is a time that really
//! was measured. The tests compare with the definition by counting.

/// The quantile of `sorted` at `per_mille` thousandths: the smallest sample that at least that share
/// of all samples does not exceed.
///
/// `None` if there are no samples. `sorted` must be ascending; O(1).
#[must_use]
pub fn quantile(sorted: &[f64], per_mille: u16) -> Option<f64> {
    let rank = sorted.len().checked_mul(usize::from(per_mille.min(1000)))?.div_ceil(1000);
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Fewer samples than this say nothing about spread.
pub const SAMPLES_MIN: usize = 7;

/// What a row says of its samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The middle sample, in the samples' unit.
    pub median: f64,
    /// The 99th percentile, in the samples' unit.
    pub p99: f64,
    /// `(p95 - p5) / median`: how far the run wandered, as a share. Of fewer than [`SAMPLES_MIN`] nobody can say.
    pub spread: Option<f64>,
}

/// Summarises `samples`, in any order; `None` if there are none or one is not a finite number.
///
/// O(n log n), one allocation.
#[must_use]
pub fn summarise(samples: &[f64]) -> Option<Summary> {
    if samples.iter().any(|sample| !sample.is_finite()) {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let median = quantile(&sorted, 500)?;
    let (low, high) = (quantile(&sorted, 50)?, quantile(&sorted, 950)?);
    let spread = if median == 0.0 { 0.0 } else { (high - low) / median };
    let spread = (sorted.len() >= SAMPLES_MIN).then_some(spread);
    Some(Summary { median, p99: quantile(&sorted, 990)?, spread })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_smallest_sample_that_enough_samples_do_not_exceed() {
        for count in 1..60_u32 {
            let sorted: Vec<f64> = (0..count).map(|n| f64::from(n / 3)).collect();
            for per_mille in (0..=1000).step_by(5) {
                let needed = f64::from(count) * f64::from(per_mille) / 1000.0;
                let oracle = sorted
                    .iter()
                    .copied()
                    .find(|limit| {
                        let share = sorted.iter().filter(|sample| *sample <= limit).count();
                        share as f64 >= needed - 1e-9
                    })
                    .unwrap();
                assert_eq!(quantile(&sorted, per_mille), Some(oracle), "{count} {per_mille}");
            }
        }
    }

    #[test]
    fn a_summary_does_not_depend_on_the_order() {
        let up: Vec<f64> = (1..=1000).map(f64::from).collect();
        let mut mixed = up.clone();
        mixed.reverse();
        mixed.swap(17, 801);
        let got = summarise(&mixed).unwrap();
        assert_eq!(got, summarise(&up).unwrap());
        assert_eq!((got.median, got.p99), (500.0, 990.0));
        assert!((got.spread.unwrap() - (950.0 - 50.0) / 500.0).abs() < 1e-12);
    }

    #[test]
    fn no_samples_and_nonsense_have_no_summary() {
        assert_eq!(summarise(&[]), None);
        assert_eq!(summarise(&[1.0, f64::NAN]), None);
        assert_eq!(summarise(&[3.0]), Some(Summary { median: 3.0, p99: 3.0, spread: None }));
    }

    #[test]
    fn a_few_samples_say_nothing_of_spread() {
        for count in 1..20 {
            let spread = summarise(&vec![0.0; count]).unwrap().spread;
            assert_eq!(spread, (count >= SAMPLES_MIN).then_some(0.0), "{count}");
        }
    }
}
