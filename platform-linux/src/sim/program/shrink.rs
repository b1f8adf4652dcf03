//! Makes a failing program as short as it can.

use super::operation::Operation;

/// The operations without which `fails` is no longer true, of those that it is true of; tries at most
/// `tries` times, and no more once `stopped`.
///
/// Drops ever smaller runs of operations, the last ones first, for as long as something can be dropped.
pub fn shrink(
    operations: &[Operation],
    mut tries: usize,
    mut fails: impl FnMut(&[Operation]) -> bool,
    mut stopped: impl FnMut() -> bool,
) -> Vec<Operation> {
    let mut kept = operations.to_vec();
    let mut size = kept.len().div_ceil(2);
    while size > 0 {
        let mut dropped = false;
        let mut end = kept.len();
        while end > 0 {
            if tries == 0 || stopped() {
                return kept;
            }
            tries -= 1;
            let start = end.saturating_sub(size);
            let mut shorter = kept.clone();
            shorter.drain(start..end);
            if fails(&shorter) {
                kept = shorter;
                dropped = true;
            }
            end = start;
        }
        if !dropped || size > 1 {
            size /= 2;
        }
    }
    kept
}
