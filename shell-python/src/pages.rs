//! Page numbers from any buffer of integers, without a loop in Python.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::buffer::View;
use crate::errors;

/// Page numbers as the engine keeps them. Made once, it costs nothing to be used again.
#[pyclass(module = "immwire", frozen, from_py_object)]
#[derive(Clone)]
pub(crate) struct PageIndices(immwire::PageIndices);

#[pymethods]
impl PageIndices {
    /// Of an array or buffer of 32- or 64-bit integers, or a sequence of them.
    #[new]
    #[pyo3(signature = (pages, /))]
    fn new(pages: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(same) = pages.extract() {
            return Ok(same);
        }
        if View::offered(pages) {
            return from_view(&View::items(pages)?).map(Self);
        }
        let listed: Vec<u32> = pages.extract().map_err(|error| {
            let message = "page numbers are integers of 32 bits, 0 to 4294967295";
            let better = PyTypeError::new_err(message);
            better.set_cause(pages.py(), Some(error));
            better
        })?;
        Ok(Self(listed.into()))
    }

    fn __len__(&self) -> usize {
        self.0.numbers().len()
    }

    fn __repr__(&self) -> String {
        format!("<PageIndices of {} pages>", self.0.numbers().len())
    }
}

/// The page numbers of an argument.
pub(crate) fn of(pages: &Bound<'_, PyAny>) -> PyResult<immwire::PageIndices> {
    match pages.cast::<PageIndices>() {
        Ok(made) => Ok(made.get().0.clone()),
        Err(_) => PageIndices::new(pages).map(|pages| pages.0),
    }
}

/// A machine integer that may name a page.
trait Item: Copy {
    /// Its low bits.
    fn low(self) -> u32;
    /// Zero if there is nothing beyond them, and it is not negative.
    fn beyond(self) -> u64;
}

impl Item for u32 {
    fn low(self) -> u32 {
        self
    }

    fn beyond(self) -> u64 {
        0
    }
}

impl Item for i32 {
    fn low(self) -> u32 {
        self.cast_unsigned()
    }

    fn beyond(self) -> u64 {
        u64::from(self.cast_unsigned() >> 31)
    }
}

impl Item for u64 {
    #[expect(clippy::cast_possible_truncation, reason = "`beyond` tells of what is lost")]
    fn low(self) -> u32 {
        self as u32
    }

    fn beyond(self) -> u64 {
        self >> 32
    }
}

impl Item for i64 {
    fn low(self) -> u32 {
        self.cast_unsigned().low()
    }

    fn beyond(self) -> u64 {
        self.cast_unsigned().beyond()
    }
}

fn from_view(view: &View) -> PyResult<immwire::PageIndices> {
    let Some((len, stride)) = view.line() else {
        return Err(errors::request("page numbers come in one dimension"));
    };
    let copied = match (view.letter().unwrap_or(b'?'), view.itemsize()) {
        (b'I' | b'L', 4) => copy::<u32>(view, len, stride),
        (b'i' | b'l', 4) => copy::<i32>(view, len, stride),
        (b'L' | b'Q' | b'N', 8) => copy::<u64>(view, len, stride),
        (b'l' | b'q' | b'n', 8) => copy::<i64>(view, len, stride),
        (_, item) => {
            return Err(PyTypeError::new_err(format!(
                "page numbers are integers of 32 or 64 bits, not {:?} of {item} bytes",
                String::from_utf8_lossy(view.format())
            )));
        }
    };
    copied.ok_or_else(|| errors::request("page numbers are 0 to 4294967295"))
}

/// The numbers; none, if one of them does not fit.
fn copy<T: Item>(view: &View, len: usize, stride: isize) -> Option<immwire::PageIndices> {
    let first = view.ptr().cast::<T>();
    let at = |i: usize| {
        let bytes = i.cast_signed().wrapping_mul(stride);
        // SAFETY: `i` is below the number of items, which lie `stride` bytes apart (PEP 3118), in memory
        // that is valid while the view is held. It may be misaligned; another thread may write there, in
        // which case the number is anything, and checked like any other.
        unsafe { first.wrapping_byte_offset(bytes).read_unaligned() }
    };
    let mut beyond = 0;
    // Written to where they stay: of a range it is known how many there are.
    let pages: Arc<[u32]> = if stride == size_of::<T>().cast_signed() {
        // Without gaps, in a form that is turned into vector instructions. Each number is read once: what
        // is checked is what is kept.
        let numbers = (0..len).map(|i| {
            // SAFETY: as above.
            let item = unsafe { first.add(i).read_unaligned() };
            beyond |= item.beyond();
            item.low()
        });
        numbers.collect()
    } else {
        let numbers = (0..len).map(|i| {
            let item = at(i);
            beyond |= item.beyond();
            item.low()
        });
        numbers.collect()
    };
    (beyond == 0).then(|| pages.into())
}
