//! Where an object's memory lies: by the buffer protocol, `__array_interface__`, DLPack, or an address.
//!
//! Memory of a GPU is told apart first: `__cuda_array_interface__`, be it that it raises, or a DLPack device that is not the
//! host. Which GPU it is of, the engine finds out by the address. Whatever is found is held for as long as peers
//! may write there. Streams of GPUs are found here, too.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr::NonNull;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyTuple};

use crate::buffer::View;
use crate::errors;

/// Memory, and what keeps it there.
pub(crate) struct Memory {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) readonly: bool,
    /// What lies there, where that is known; of a buffer only how wide it is.
    pub(crate) item: Option<Item>,
    pub(crate) keep: Keep,
}

/// The type of an array's items.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// In a letter of numpy's array interface, if it is in this machine's order of bytes; else a question mark.
    kind: u8,
    bytes: usize,
}

impl Item {
    pub(crate) const INT32: Self = Self { kind: b'i', bytes: 4 };
    pub(crate) const INT64: Self = Self { kind: b'i', bytes: 8 };
    pub(crate) const FLOAT32: Self = Self { kind: b'f', bytes: 4 };

    /// Of an array's interface: a letter for the order of bytes, one for the kind, then the bytes of an item.
    fn of_array(typestr: &str) -> Option<Self> {
        let (order, kind) = (*typestr.as_bytes().first()?, *typestr.as_bytes().get(1)?);
        let bytes = typestr.get(2..)?.parse().ok()?;
        let own = if cfg!(target_endian = "little") { b'<' } else { b'>' };
        let is_ours = bytes == 1 || order == own || order == b'=';
        Some(Self { kind: if is_ours { kind } else { b'?' }, bytes })
    }

    /// Whether items may be taken for these: they are, but for a sign, or they are bytes, of which nothing is known.
    pub(crate) fn may_be(self, other: Self) -> bool {
        // Some libraries have indices without a sign: below 2^31 they are the same.
        let signed = |item: Self| if item.kind == b'u' { b'i' } else { item.kind };
        self.are_bytes() || (self.bytes == other.bytes && signed(self) == signed(other))
    }

    /// Whether items may be taken for the 16-bit numbers that results are of: they are as wide, or bytes, of which nothing is known. Which of two
    /// formats they are of, not all libraries say right.
    pub(crate) fn may_be_results(self) -> bool {
        matches!(self.bytes, 1 | 2)
    }

    /// Whether nothing is known of what they are parts of.
    pub(crate) fn are_bytes(self) -> bool {
        self.bytes == 1
    }

    /// Whether each has 64 bits.
    pub(crate) fn are_wide(self) -> bool {
        self.bytes == 8
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.bytes.saturating_mul(8);
        match self.kind {
            b'i' => write!(f, "int{bits}"),
            b'u' => write!(f, "uint{bits}"),
            b'f' => write!(f, "float{bits}"),
            _ => write!(f, "items of {} bytes", self.bytes),
        }
    }
}

/// What is said of an array that has other items than are wanted.
pub(crate) fn unlike(what: &str, found: Item, wanted: impl fmt::Display) -> String {
    format!(
        "{what} has {found} instead of {wanted}: convert it, or pass a view of its bytes if that is what they are"
    )
}

/// What is held so that memory stays. Dropped, it lets go.
pub(crate) enum Keep {
    /// The engine's own, or the caller's promise.
    Nothing,
    /// A view, which also stops its object from resizing.
    View { _view: View },
    /// The object that said where the memory is.
    Object { _object: Py<PyAny> },
}

// SAFETY: an address, and holders that may be shared between threads. What lies there is only ever copied,
// through pointers.
unsafe impl Sync for Memory {}

impl Memory {
    /// Refuses items that say of themselves that they cannot be 16-bit numbers, as `what` is to have.
    pub(crate) fn are_results(&self, what: &str, wanted: &str) -> PyResult<()> {
        match self.item {
            Some(item) if self.len > 0 && !item.may_be_results() => {
                Err(errors::request(&unlike(what, item, wanted)))
            }
            _ => Ok(()),
        }
    }

    /// Copies the first `len` bytes of it to `bytes`, or all if it has fewer. What others write meanwhile comes torn.
    pub(crate) fn copy_to(&self, bytes: &mut Vec<u8>, len: usize) {
        let len = len.min(self.len);
        bytes.resize(len, 0);
        // SAFETY: the memory is valid for `self.len` bytes while this is held, or its caller has promised it;
        // `bytes` has `len` of its own. Others may write to the memory meanwhile: then the copy is torn, and no
        // reference was formed.
        unsafe { std::ptr::copy(self.ptr.as_ptr(), bytes.as_mut_ptr(), len) };
    }

    /// Copies `bytes` to its beginning, as many as fit. It must not be read only.
    pub(crate) fn copy_from(&self, bytes: &[u8]) {
        self.copy_from_at(0, bytes);
    }

    /// The same from `offset` on.
    pub(crate) fn copy_from_at(&self, offset: usize, bytes: &[u8]) {
        let Some(room) = self.len.checked_sub(offset) else { return };
        // SAFETY: as above, the other way round: not read only, the memory may be written to; `offset` lies in it, or at its end, and
        // behind it there are `room` bytes.
        unsafe {
            let to = self.ptr.as_ptr().add(offset);
            std::ptr::copy(bytes.as_ptr(), to, bytes.len().min(room));
        }
    }
}

/// Finds the memory of `object`, of some bytes; a GPU's only if `gpus` are used.
pub(crate) fn find(object: &Bound<'_, PyAny>, gpus: bool) -> PyResult<Memory> {
    match look(object, gpus)? {
        Memory { len: 0, .. } => {
            Err(errors::request("a region of zero bytes cannot be registered"))
        }
        memory => Ok(memory),
    }
}

/// Finds memory of the host, perhaps of no bytes, to be copied from or to during a call.
pub(crate) fn lent(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    match object.getattr_opt(intern!(object.py(), "__cuda_array_interface__")) {
        Ok(None) => look(object, false),
        // Some have the interface, but not for all element types.
        Ok(Some(_)) | Err(_) => Err(errors::unsupported(&format!(
            "{} is in GPU memory: copy it to the host first",
            kind(object)
        ))),
    }
}

/// Finds memory of a GPU, perhaps of no bytes, that kernels are told of: of the object's streams nothing is asked.
pub(crate) fn on_gpu(what: &str, object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let py = object.py();
    if let Ok(pair) = object.cast::<PyTuple>() {
        return address(pair);
    }
    match object.getattr_opt(intern!(py, "__cuda_array_interface__")) {
        Ok(Some(interface)) => return array(object, &interface),
        Ok(None) => {}
        // Some have the interface, but not for all element types.
        Err(error) => {
            let message = format!("{what}: {}", no_interface(object, &error, None));
            return Err(errors::unsupported(&message));
        }
    }
    if object.hasattr(intern!(py, "__dlpack_device__"))? {
        let (device, _): (i32, i32) =
            object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if device == DL_CUDA {
            return dlpack(object, true);
        }
    }
    let message = format!("{what}: {} is not in GPU memory: copy it there first", kind(object));
    Err(errors::unsupported(&message))
}

/// Finds memory of a GPU whose interface has raised `error`, as some do for some element types: by DLPack, if that has it.
fn without_interface(object: &Bound<'_, PyAny>, error: &PyErr) -> PyResult<Memory> {
    let py = object.py();
    let by_dlpack = || -> PyResult<Option<Memory>> {
        let offered = object.getattr_opt(intern!(py, "__dlpack_device__"))?;
        let device = offered.map(|device| device.call0()?.extract::<(i32, i32)>()).transpose()?;
        match device {
            Some((DL_CUDA, _)) => dlpack(object, true).map(Some),
            _ => Ok(None),
        }
    };
    let refused = |other: Option<&PyErr>| errors::unsupported(&no_interface(object, error, other));
    match by_dlpack() {
        Ok(Some(memory)) => Ok(memory),
        Ok(None) => Err(refused(None)),
        Err(other) => Err(refused(Some(&other))),
    }
}

/// What is said of a GPU's memory that raises where it is asked for.
fn no_interface(object: &Bound<'_, PyAny>, error: &PyErr, other: Option<&PyErr>) -> String {
    let kind = kind(object);
    let other = other.map_or(String::new(), |other| format!(", and DLPack {other}"));
    format!("__cuda_array_interface__ of {kind} raised {error}{other}: pass a view of its bytes")
}

fn look(object: &Bound<'_, PyAny>, gpus: bool) -> PyResult<Memory> {
    let py = object.py();
    if let Ok(pair) = object.cast::<PyTuple>() {
        return address(pair);
    }
    match object.getattr_opt(intern!(py, "__cuda_array_interface__")) {
        Ok(None) => {}
        // That it raises says, too, where the memory is.
        Ok(Some(_)) | Err(_) if !gpus => return Err(gpu(&kind(object))),
        Ok(Some(interface)) => return array(object, &interface),
        Err(error) => return without_interface(object, &error),
    }
    if View::offered(object) {
        return viewed(object);
    }
    if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
        return array(object, &interface);
    }
    if object.hasattr(intern!(py, "__dlpack__"))? {
        return dlpack(object, gpus);
    }
    let message = format!(
        "{} has no memory to register: neither a buffer, __array_interface__ nor __dlpack__, nor is it \
         a tuple (address, bytes)",
        kind(object)
    );
    Err(errors::unsupported(&message))
}

/// The handle of a GPU's stream: of an object that has `__cuda_stream__`, whose version 0 is a pair of version and handle,
/// or the number itself. As a number, for who detaches to use it.
pub(crate) fn stream(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    let protocol = object.getattr_opt(intern!(object.py(), "__cuda_stream__"))?;
    match protocol {
        None => object.extract().map_err(|_| {
            let kind = kind(object);
            PyTypeError::new_err(format!(
                "a stream is an integer or has __cuda_stream__, not {kind}"
            ))
        }),
        Some(protocol) => match protocol.call0()?.extract::<(u32, usize)>()? {
            (0, handle) => Ok(handle),
            (version, _) => {
                let message = format!("__cuda_stream__ of version {version}: only 0 is known");
                Err(errors::unsupported(&message))
            }
        },
    }
}

fn kind(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .fully_qualified_name()
        .map_or_else(|_| "this object".into(), |n| n.to_string())
}

fn gpu(what: &str) -> PyErr {
    errors::unsupported(&format!(
        "{what} is in GPU memory, which this engine cannot reach: name its GPU when the engine is made (gpus=[0]), \
         or copy it to the host first"
    ))
}

fn found(ptr: usize, len: usize, readonly: bool, item: Option<Item>, keep: Keep) -> Memory {
    // Nothing lies at address zero.
    let (ptr, len) = NonNull::new(std::ptr::with_exposed_provenance_mut(ptr))
        .map_or((NonNull::dangling(), 0), |ptr| (ptr, len));
    Memory { ptr, len, readonly, item, keep }
}

fn address(pair: &Bound<'_, PyTuple>) -> PyResult<Memory> {
    let (ptr, len): (usize, usize) = pair.extract().map_err(|_| {
        PyTypeError::new_err("memory by address is a tuple of two integers, (address, bytes)")
    })?;
    if ptr.checked_add(len).is_none() {
        return Err(PyValueError::new_err("the range wraps around the end of the address space"));
    }
    Ok(found(ptr, len, false, None, Keep::Nothing))
}

fn viewed(object: &Bound<'_, PyAny>) -> PyResult<Memory> {
    // Asked for writing first: what it says of itself otherwise may be stricter than what it allows.
    let view = match View::contiguous(object, true) {
        Ok(view) => view,
        Err(_) => View::contiguous(object, false)?,
    };
    let (ptr, len, readonly) = (view.ptr(), view.len(), view.readonly());
    let item = Some(Item { kind: b'?', bytes: view.itemsize() });
    Ok(found(ptr.expose_provenance(), len, readonly, item, Keep::View { _view: view }))
}

/// numpy's array interface, version 3, or Numba's for CUDA, which has the same fields and two more: a mask, and a
/// stream, which is its owner's to wait for.
fn array(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Memory> {
    let py = object.py();
    let fields = interface.cast::<PyDict>()?;
    if fields.get_item(intern!(py, "mask"))?.is_some_and(|mask| !mask.is_none()) {
        return Err(errors::unsupported("an array with a mask cannot be registered"));
    }
    let wanted = |name: &str| {
        let missing = || PyTypeError::new_err(format!("the array's interface has no {name}"));
        fields.get_item(name)?.ok_or_else(missing)
    };
    let (ptr, readonly): (usize, bool) = wanted("data")?.extract().map_err(|_| {
        PyTypeError::new_err("data of the array's interface is not (address, read only)")
    })?;
    let shape: Vec<i64> = wanted("shape")?.extract()?;
    let typestr: String = wanted("typestr")?.extract()?;
    let no_size = || PyTypeError::new_err(format!("{typestr:?} has no size"));
    let item = Item::of_array(&typestr).ok_or_else(no_size)?;
    let strides: Option<Vec<i64>> = match fields.get_item(intern!(py, "strides"))? {
        Some(strides) => strides.extract()?,
        None => None,
    };
    let len = contiguous(&shape, strides.as_deref(), item.bytes)?;
    let keep = Keep::Object { _object: object.clone().unbind() };
    Ok(found(ptr, len, readonly, Some(item), keep))
}

/// Bytes of a C-contiguous array; strides count `unit`s as the item's size does.
fn contiguous(shape: &[i64], strides: Option<&[i64]>, item: usize) -> PyResult<usize> {
    let too_large = || PyValueError::new_err("the array is too large");
    let mut len = i64::try_from(item).map_err(|_| too_large())?;
    for (axis, &extent) in shape.iter().enumerate().rev() {
        let stride = strides.and_then(|strides| strides.get(axis));
        if extent > 1 && stride.is_some_and(|&stride| stride != len) {
            let message = "only C-contiguous arrays can be registered: make a contiguous copy";
            return Err(errors::request(message));
        }
        len = len.checked_mul(extent).ok_or_else(too_large)?;
    }
    usize::try_from(len).map_err(|_| PyValueError::new_err("the array has a negative size"))
}

/// `DLTensor` of DLPack's C API.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`, from version 1 on.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

const DL_CPU: i32 = 1;
/// Memory of a GPU.
const DL_CUDA: i32 = 2;
/// Memory of the host that CUDA has pinned.
const DL_CUDA_HOST: i32 = 3;
const DL_READ_ONLY: u64 = 1;
const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

/// Whether memory of a DLPack device can be registered.
fn reaches(device: i32, gpus: bool) -> bool {
    matches!(device, DL_CPU | DL_CUDA_HOST) || (gpus && device == DL_CUDA)
}

/// The tensor is left in its capsule, which frees it when it is dropped: so nothing is to be renamed, and
/// no deleter called.
fn dlpack(object: &Bound<'_, PyAny>, gpus: bool) -> PyResult<Memory> {
    let py = object.py();
    let (device, _): (i32, i32) =
        object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    if !reaches(device, gpus) {
        return Err(gpu(&kind(object)));
    }
    let asked = PyDict::new(py);
    if device == DL_CUDA {
        // No stream is to wait for the tensor's: whose work comes when is the caller's to say.
        asked.set_item(intern!(py, "stream"), -1)?;
    }
    asked.set_item(intern!(py, "max_version"), (1, 0))?;
    let export = object.getattr(intern!(py, "__dlpack__"))?;
    let mut answer = export.call((), Some(&asked));
    // What is older takes no version, or nothing.
    for older in ["max_version", "stream"] {
        if answer.as_ref().is_err_and(|error| error.is_instance_of::<PyTypeError>(py)) {
            if asked.contains(older)? {
                asked.del_item(older)?;
            }
            answer = export.call((), Some(&asked));
        }
    }
    let capsule = answer?;
    let capsule = capsule.cast_into::<PyCapsule>()?;
    // SAFETY: a capsule of that name holds a pointer to such a struct (DLPack, "Python Specification"),
    // valid while the capsule is alive and not renamed; it is ours alone.
    let (tensor, flags) = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), VERSIONED.as_ptr()) != 0 {
            let managed: &DlVersioned =
                capsule.pointer_checked(Some(VERSIONED))?.cast::<DlVersioned>().as_ref();
            if managed.major != 1 {
                let message = format!("DLPack version {} is not known", managed.major);
                return Err(errors::unsupported(&message));
            }
            (&managed.tensor, managed.flags)
        } else {
            let managed: &DlTensor =
                capsule.pointer_checked(Some(UNVERSIONED))?.cast::<DlTensor>().as_ref();
            (managed, 0)
        }
    };
    if !reaches(tensor.device_type, gpus) {
        return Err(gpu(&kind(object)));
    }
    let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
    if !bits.is_multiple_of(8) {
        return Err(errors::unsupported("items of less than a byte cannot be registered"));
    }
    let axes = usize::try_from(tensor.ndim).unwrap_or(0);
    let numbers = |first: *const i64| {
        // SAFETY: not null, it points to `ndim` numbers (DLPack, `DLTensor`).
        let all = || unsafe { std::slice::from_raw_parts(first, axes) };
        (!first.is_null()).then(all)
    };
    // Codes of DLPack's `DLDataTypeCode`.
    let kind = match (tensor.code, tensor.lanes) {
        (0, 1) => b'i',
        (1, 1) => b'u',
        (2, 1) => b'f',
        _ => b'?',
    };
    let item = Item { kind, bytes: bits / 8 };
    let shape = numbers(tensor.shape).unwrap_or(&[]);
    // DLPack counts strides in items.
    let unit = i64::try_from(item.bytes).unwrap_or(i64::MAX);
    let strides: Option<Vec<i64>> = numbers(tensor.strides)
        .map(|strides| strides.iter().map(|stride| stride.saturating_mul(unit)).collect());
    let len = contiguous(shape, strides.as_deref(), item.bytes)?;
    let offset = usize::try_from(tensor.byte_offset).unwrap_or(usize::MAX);
    let ptr = tensor.data.expose_provenance().checked_add(offset);
    let ptr = ptr.ok_or_else(|| PyValueError::new_err("the tensor's offset is beyond memory"))?;
    let keep = Keep::Object { _object: capsule.into_any().unbind() };
    Ok(found(ptr, len, flags & DL_READ_ONLY != 0, Some(item), keep))
}
