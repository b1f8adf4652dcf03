//! `immwire.moe.MoeReport`: what went wrong in an exchange, of either kind.

use std::collections::BTreeMap;

use immwire::moe::{Phase, Report, Why, gpu};
use pyo3::prelude::*;

/// What went wrong at one rank, with the rounds in which it did, from 1 on. True if anything did.
#[pyclass(module = "immwire.moe", frozen)]
#[derive(Default, PartialEq, Eq)]
pub(crate) struct MoeReport {
    /// Ranks whose choices did not come in time, with the round of which that is so (among GPUs, the last such).
    #[pyo3(get)]
    late_tables: BTreeMap<usize, u64>,
    /// Ranks whose tokens did not come in time, though their choices did. In host memory the first chunk of tokens counts as the choices.
    #[pyo3(get)]
    late_tokens: BTreeMap<usize, u64>,
    /// Ranks whose results did not come in time.
    #[pyo3(get)]
    late_results: BTreeMap<usize, u64>,
    /// Ranks that have left this one out, with the round in which that was found. They are in one of those above, too. Only in host memory.
    #[pyo3(get)]
    left_by: BTreeMap<usize, u64>,
    /// In words, why each rank is left out. Only in host memory.
    #[pyo3(get)]
    reasons: BTreeMap<usize, String>,
    /// The first of this rank's choices that is no expert, or one that its token names twice, and was dropped: the round, the token, which
    /// of its choices, and what it was. Only among GPUs.
    #[pyo3(get)]
    refused: Option<(u32, u32, u32, i32)>,
    /// The last round in which there were more rows than ``out`` had room for, or ``y`` had. Only among GPUs.
    #[pyo3(get)]
    rows_left_out: Option<u32>,
    /// The last round in which ``count`` said more tokens than there may be, or was below zero. Only among GPUs.
    #[pyo3(get)]
    tokens_left_out: Option<u32>,
}

impl MoeReport {
    /// Of kernels.
    pub(super) fn of_gpu(report: &gpu::MoeReport) -> Self {
        let some = |round: u32| Some(round).filter(|round| *round != 0);
        Self {
            late_tables: rounds(&report.late_table),
            late_tokens: rounds(&report.late_tokens),
            late_results: rounds(&report.late_results),
            refused: some(report.refused)
                .map(|round| (round, report.token, report.choice, report.index)),
            rows_left_out: some(report.rows_left_out),
            tokens_left_out: some(report.tokens_left_out),
            ..Self::default()
        }
    }

    /// Of an exchange in host memory.
    pub(super) fn of_host(report: &Report) -> Self {
        let mut all = Self::default();
        for absent in &report.absent {
            let rank = usize::try_from(absent.rank).unwrap_or(usize::MAX);
            let late = match (absent.phase, absent.chunk) {
                (Phase::Combine, _) => &mut all.late_results,
                (_, 0) => &mut all.late_tables,
                _ => &mut all.late_tokens,
            };
            late.insert(rank, absent.round);
            if absent.why == Why::LeftUs {
                all.left_by.insert(rank, absent.round);
            }
            all.reasons.insert(rank, absent.why.to_string());
        }
        all
    }
}

#[pymethods]
impl MoeReport {
    fn __bool__(&self) -> bool {
        *self != Self::default()
    }

    fn __repr__(&self) -> String {
        if !self.__bool__() {
            return "MoeReport(nothing went wrong)".into();
        }
        let Self { late_tables, late_tokens, late_results, left_by, reasons, .. } = self;
        let (refused, rows_left_out) = (self.refused, self.rows_left_out);
        let tokens_left_out = self.tokens_left_out;
        format!(
            "MoeReport(late_tables={late_tables:?}, late_tokens={late_tokens:?}, late_results={late_results:?}, \
             left_by={left_by:?}, reasons={reasons:?}, refused={refused:?}, rows_left_out={rows_left_out:?}, \
             tokens_left_out={tokens_left_out:?})"
        )
    }
}

fn rounds(words: &[u32]) -> BTreeMap<usize, u64> {
    let late = words.iter().copied().enumerate().filter(|(_, round)| *round != 0);
    late.map(|(rank, round)| (rank, round.into())).collect()
}
