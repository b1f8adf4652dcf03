//! Python's buffer protocol, both ways, for every Python from 3.10.
//!
//! The limited API has it from 3.11 on only, and PyO3 with it. But the functions, the slots and the
//! struct below are the same in every CPython since 3.9, and 3.10 is past its end of life, so that no
//! release can change them any more (PEP 3118; "Stable Application Binary Interface" in the C API's
//! manual, which has frozen them from 3.11 on). The tests run on both sides of that line.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, NonNull};

use pyo3::ffi;
use pyo3::prelude::*;

/// `Py_buffer`: "The buffer structure" of the C API's manual.
#[repr(C)]
struct RawView {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

const EMPTY: RawView = RawView {
    buf: ptr::null_mut(),
    obj: ptr::null_mut(),
    len: 0,
    itemsize: 0,
    readonly: 0,
    ndim: 0,
    format: ptr::null_mut(),
    shape: ptr::null_mut(),
    strides: ptr::null_mut(),
    suboffsets: ptr::null_mut(),
    internal: ptr::null_mut(),
};

// `PyBUF_*` of `Include/pybuffer.h`.
const WRITABLE: c_int = 0x1;
const FORMAT: c_int = 0x4;
const STRIDES: c_int = 0x10 | 0x8;
const C_CONTIGUOUS: c_int = 0x20 | STRIDES;
// `Py_bf_*` of `Include/typeslots.h`.
const SLOT_GETBUFFER: c_int = 1;
const SLOT_RELEASEBUFFER: c_int = 2;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawView);
    fn PyBuffer_FillInfo(
        view: *mut RawView,
        object: *mut ffi::PyObject,
        buf: *mut c_void,
        len: isize,
        readonly: c_int,
        flags: c_int,
    ) -> c_int;
}

/// Another object's memory, which stays where it is until this is dropped.
pub(crate) struct View(Box<RawView>);

// SAFETY: the view is a record of addresses; it is given back with the interpreter attached, which is
// all that `PyBuffer_Release` asks for.
unsafe impl Send for View {}
// SAFETY: as above; a shared reference only reads it.
unsafe impl Sync for View {}

impl View {
    /// Whether the object offers its memory.
    pub(crate) fn offered(object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: the object is alive, and the interpreter attached.
        unsafe { PyObject_CheckBuffer(object.as_ptr()) != 0 }
    }

    /// Contiguous memory, to be read alone or also to be written.
    pub(crate) fn contiguous(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        Self::take(object, C_CONTIGUOUS | if writable { WRITABLE } else { 0 })
    }

    /// Items of a known format, perhaps with gaps between them.
    pub(crate) fn items(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::take(object, STRIDES | FORMAT)
    }

    /// Contiguous items of a known format, to be read.
    pub(crate) fn typed(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::take(object, C_CONTIGUOUS | FORMAT)
    }

    fn take(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(EMPTY);
        // SAFETY: the object is alive, the interpreter attached, and `view` a place for the answer, which
        // does not move until it is released: it is boxed.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
            // Nothing to release.
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self(view))
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.0.buf.cast()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len.unsigned_abs()
    }

    /// A copy of it. What others write meanwhile comes torn.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = Vec::with_capacity(self.len());
        // SAFETY: for `copy_nonoverlapping` and `set_len`: the memory is valid for its length while the view is
        // held, `bytes` is new and has room for as many, and all of them are written. Others may write to the
        // view's memory meanwhile: then the copy is torn, and no reference was formed.
        unsafe {
            ptr::copy_nonoverlapping(self.ptr(), bytes.as_mut_ptr(), self.len());
            bytes.set_len(self.len());
        }
        bytes
    }

    pub(crate) fn readonly(&self) -> bool {
        self.0.readonly != 0
    }

    /// Bytes of one item.
    pub(crate) fn itemsize(&self) -> usize {
        self.0.itemsize.unsigned_abs()
    }

    /// What an item is, in the letters of the module `struct`; bytes, if it does not say.
    pub(crate) fn format(&self) -> &[u8] {
        let format = NonNull::new(self.0.format);
        // SAFETY: not null, it is a string that lives as long as the view.
        format.map_or(b"B", |format| unsafe { CStr::from_ptr(format.as_ptr()) }.to_bytes())
    }

    /// What an item is, in one letter, if it is in this machine's order of bytes.
    pub(crate) fn letter(&self) -> Option<u8> {
        match self.format() {
            [letter] | [b'@' | b'=', letter] => Some(*letter),
            [b'<', letter] if cfg!(target_endian = "little") => Some(*letter),
            _ => None,
        }
    }

    /// Items by dimension.
    pub(crate) fn shape(&self) -> Vec<usize> {
        let axes = usize::try_from(self.0.ndim).unwrap_or(0);
        let shape = NonNull::new(self.0.shape);
        // SAFETY: asked for with strides, it points to `ndim` numbers, which live as long as the view.
        let extent = |axis| shape.map(|shape| unsafe { shape.add(axis).read() }.unsigned_abs());
        (0..axes).filter_map(extent).collect()
    }

    /// Items, and bytes from one to the next, of memory that has one dimension.
    pub(crate) fn line(&self) -> Option<(usize, isize)> {
        let (shape, strides) = (NonNull::new(self.0.shape)?, NonNull::new(self.0.strides)?);
        if self.0.ndim != 1 || !self.0.suboffsets.is_null() {
            return None;
        }
        // SAFETY: asked for with strides, both point to `ndim` numbers, here one.
        unsafe { Some((shape.read().unsigned_abs(), strides.read())) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // At the interpreter's end there is nobody to give it back to.
        let _ = Python::try_attach(|_| {
            // SAFETY: it was taken, and is released once, with the interpreter attached.
            unsafe { PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

/// Memory that an object of ours offers.
pub(crate) struct Offer {
    pub(crate) ptr: *mut u8,
    pub(crate) len: u64,
    pub(crate) readonly: bool,
}

/// An object whose memory may be viewed.
pub(crate) trait Exporter:
    pyo3::PyClass<Frozen = pyo3::pyclass::boolean_struct::True> + Sync
{
    /// One view more; it stays valid until [`Exporter::released`].
    fn exported(&self) -> PyResult<Offer>;

    /// One view less.
    fn released(&self);
}

/// Who is told of a view's end, whatever its class.
trait Lender: Send + Sync {
    fn released(&self);
}

impl<T: Exporter> Lender for Py<T> {
    fn released(&self) {
        self.get().released();
    }
}

/// What a view names as its object: it holds the exporter, and the view counts for as long as this is held. Some, torch among
/// them, release a view at once, use its memory, and keep only its object.
#[pyclass(module = "immwire", name = "_Lease", frozen)]
struct Lease(Box<dyn Lender>);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.released();
    }
}

/// A subclass of `T` that has a buffer, as `name` (`module.Class`), with `doc`.
pub(crate) fn exporting_class<'py, T: Exporter>(
    py: Python<'py>,
    name: &'static CStr,
) -> PyResult<Bound<'py, PyAny>> {
    let mut slots = [
        ffi::PyType_Slot {
            slot: SLOT_GETBUFFER,
            pfunc: get_buffer::<T> as unsafe extern "C" fn(_, _, _) -> _ as *mut c_void,
        },
        ffi::PyType_Slot {
            slot: SLOT_RELEASEBUFFER,
            pfunc: release_buffer as unsafe extern "C" fn(_, _) as *mut c_void,
        },
        ffi::PyType_Slot { slot: 0, pfunc: ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: name.as_ptr(),
        basicsize: 0, // The base's.
        itemsize: 0,
        flags: u32::try_from(ffi::Py_TPFLAGS_DEFAULT).unwrap_or(0),
        slots: slots.as_mut_ptr(),
    };
    let bases = (py.get_type::<T>(),).into_pyobject(py)?;
    // SAFETY: for `PyType_FromSpecWithBases`: the spec and its slots, which end in zero, live through the
    // call; the name lives for ever; the two functions have the types that their slots want; the base
    // may be subclassed, and the subclass adds no member to it.
    unsafe {
        let class = ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr());
        Bound::from_owned_ptr_or_err(py, class)
    }
}

unsafe extern "C" fn get_buffer<T: Exporter>(
    object: *mut ffi::PyObject,
    view: *mut RawView,
    flags: c_int,
) -> c_int {
    // SAFETY: Python calls this slot attached, with an object of the class (or a subclass) that has it,
    // and a place for the view.
    unsafe {
        let py = Python::assume_attached();
        (*view).obj = ptr::null_mut();
        let exporter = Bound::from_borrowed_ptr(py, object).cast_into_unchecked::<T>();
        let lent = exporter.get().exported().and_then(|offer| {
            // From here on, whatever fails, it is dropped, and the view counts no more.
            let lease = Lease(Box::new(exporter.unbind()));
            Ok((offer, Bound::new(py, lease)?))
        });
        let (offer, lease) = match lent {
            Ok(lent) => lent,
            Err(error) => {
                error.restore(py);
                return -1;
            }
        };
        let (len, readonly) = (isize::try_from(offer.len), c_int::from(offer.readonly));
        let len = len.unwrap_or(isize::MAX);
        // The view has a reference of its own to the lease.
        PyBuffer_FillInfo(view, lease.as_ptr(), offer.ptr.cast(), len, readonly, flags)
    }
}

/// Does nothing: the lease's end does. But that there is such a slot tells numpy to keep a view, and not the object alone.
unsafe extern "C" fn release_buffer(_object: *mut ffi::PyObject, _view: *mut RawView) {}
