//! The paged copy in host memory, the plain way: what the kernels must do, byte for byte.
//!
//! Pages one after another, each with `copy_from_slice`: nothing is shared with the kernels or with [`crate::geometry`],
//! so that a mistake there is not repeated here.
//!
//! # Invariants
//!
//! Bytes outside of the target pages are left alone, and nothing is written unless all pages lie within their sides.

/// Where the pages of one side are, within a slice: page `i` starts at `base + stride * index(i)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side<'a> {
    /// Byte at which the page of index 0 starts.
    pub base: usize,
    /// Bytes from one index to the next.
    pub stride: usize,
    /// The index of each page; `None`: the page's own number.
    pub table: Option<&'a [u32]>,
}

/// A page does not lie within its side. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OracleError {
    /// A page of the source; its number.
    Source(usize),
    /// A page of the target; its number.
    Target(usize),
}

impl Side<'_> {
    /// Where page `page` lies, if that is within `limit` bytes.
    fn range(
        &self,
        page: usize,
        page_bytes: usize,
        limit: usize,
    ) -> Option<std::ops::Range<usize>> {
        let index = match self.table {
            None => page,
            Some(table) => usize::try_from(*table.get(page)?).ok()?,
        };
        let start = self.stride.checked_mul(index)?.checked_add(self.base)?;
        let end = start.checked_add(page_bytes)?;
        (end <= limit).then_some(start..end)
    }
}

/// Copies `page_count` pages of `page_bytes` from `source` to `target`, in order.
///
/// O(bytes); allocates nothing.
///
/// # Errors
///
/// A page that lies outside of its slice, or is missing in its table. Nothing was written.
pub fn copy(
    source: &[u8],
    source_side: Side<'_>,
    target: &mut [u8],
    target_side: Side<'_>,
    page_bytes: usize,
    page_count: usize,
) -> Result<(), OracleError> {
    let from =
        |page| source_side.range(page, page_bytes, source.len()).ok_or(OracleError::Source(page));
    let limit = target.len();
    let to = |page| target_side.range(page, page_bytes, limit).ok_or(OracleError::Target(page));
    for page in 0..page_count {
        from(page)?;
        to(page)?;
    }
    for page in 0..page_count {
        let bytes = source.get(from(page)?).ok_or(OracleError::Source(page))?;
        target.get_mut(to(page)?).ok_or(OracleError::Target(page))?.copy_from_slice(bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Side<'_> = Side { base: 0, stride: 4, table: None };

    #[test]
    fn pages_go_where_the_tables_say_and_nowhere_else() {
        let source: Vec<u8> = (0..32).collect();
        let mut target = [0xAA; 24];
        let from = Side { base: 1, stride: 5, table: Some(&[3, 0, 2]) };
        let to = Side { base: 2, stride: 7, table: Some(&[1, 2, 0]) };
        copy(&source, from, &mut target, to, 3, 3).unwrap();
        let mut expected = [0xAA; 24];
        expected[9..12].copy_from_slice(&[16, 17, 18]);
        expected[16..19].copy_from_slice(&[1, 2, 3]);
        expected[2..5].copy_from_slice(&[11, 12, 13]);
        assert_eq!(target, expected);
    }

    #[test]
    fn without_tables_page_numbers_are_indices() {
        let source: Vec<u8> = (0..16).collect();
        let mut target = [0; 12];
        let close = Side { base: 0, stride: 3, table: None };
        copy(&source, PLAIN, &mut target, close, 3, 4).unwrap();
        assert_eq!(target, [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]);
    }

    #[test]
    fn pages_outside_are_refused_before_anything_is_written() {
        let source = [1; 16];
        let mut target = [0; 16];
        let beyond = Side { table: Some(&[0, 4]), ..PLAIN };
        assert_eq!(copy(&source, PLAIN, &mut target, beyond, 4, 2), Err(OracleError::Target(1)));
        assert_eq!(copy(&source, beyond, &mut target, PLAIN, 4, 2), Err(OracleError::Source(1)));
        let short = Side { table: Some(&[0]), ..PLAIN };
        assert_eq!(copy(&source, PLAIN, &mut target, short, 4, 2), Err(OracleError::Target(1)));
        let far = Side { base: usize::MAX, ..PLAIN };
        assert_eq!(copy(&source, far, &mut target, PLAIN, 4, 1), Err(OracleError::Source(0)));
        let wide = Side { stride: usize::MAX, table: Some(&[2]), ..PLAIN };
        assert_eq!(copy(&source, wide, &mut target, PLAIN, 1, 1), Err(OracleError::Source(0)));
        assert_eq!(target, [0; 16]);
    }
}
