//! Compiled kernels, loaded into a GPU.

use crate::device::Device;
use crate::driver::{check, cu};
use crate::error::Error;
use crate::stuck;
use std::ffi::CStr;
use std::ptr;

/// An image of kernels in one GPU. Whoever owns it keeps it until no launch of it goes on.
#[derive(Debug)]
pub(crate) struct Module {
    device: Device,
    raw: cu::CUmodule,
}

// SAFETY: modules may be used by any thread, and by several at once; the handle is only ever passed to the driver.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a [`Module`], which lives as long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(cu::CUfunction);

// SAFETY: as for modules.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    pub(crate) fn handle(self) -> cu::CUfunction {
        self.0
    }
}

impl Module {
    /// Loads an image that `build.rs` has compiled, or left empty.
    pub(crate) fn load(device: &Device, image: &'static [u8]) -> Result<Self, Error> {
        if image.is_empty() {
            return Err(Error::KernelsAbsent);
        }
        let capability = device.gpu().capability;
        let _current = device.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the image is a fatbin, which states its own length; writes the one handle.
        match unsafe { cu::cuModuleLoadData(&raw mut raw, image.as_ptr().cast()) } {
            cu::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
                return Err(Error::NoKernelsFor { capability });
            }
            answer => check("cuModuleLoadData", answer)?,
        }
        Ok(Self { device: device.clone(), raw })
    }

    /// Finds a kernel.
    pub(crate) fn function(&self, name: &CStr) -> Result<Function, Error> {
        let _current = self.device.enter()?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, the name ends in a zero; writes the one handle.
        let found = unsafe { cu::cuModuleGetFunction(&raw mut function, self.raw, name.as_ptr()) };
        check("cuModuleGetFunction", found)?;
        Ok(Function(function))
    }

    /// Lets launches of a kernel of this module ask for up to so much dynamic shared memory.
    pub(crate) fn allow_shared(&self, function: Function, bytes: u32) -> Result<(), Error> {
        let _current = self.device.enter()?;
        let most = i32::try_from(bytes).unwrap_or(i32::MAX);
        let which = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of this module.
        let set = unsafe { cu::cuFuncSetAttribute(function.0, which, most) };
        check("cuFuncSetAttribute", set)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Some(_current) = stuck::to_free(&self.device) {
            // SAFETY: loaded by `load`, unloaded here only; no launch of it goes on (its owner's care).
            let _ = unsafe { cu::cuModuleUnload(self.raw) };
        }
    }
}
