//! The CUDA driver: found, checked for what is called of it, initialised. The only file that names `cudarc`, but for the
//! type of its error code.
//!
//! # Invariants
//!
//! 1. Nothing of the driver is called before [`load`] has succeeded: `cudarc` panics where the library or a symbol is
//!    missing, so both are looked for first.
//! 2. A context is current for the length of one [`Current`] only: whatever was current before is so again after it.

use crate::error::{CudaCode, Error};
pub(crate) use cudarc::driver::sys as cu;
use std::ptr;
use std::sync::OnceLock;

/// What of the driver this crate calls.
const SYMBOLS: [&str; 60] = [
    "cuInit",
    "cuCtxEnablePeerAccess",
    "cuCtxGetFlags",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetFlags",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFlushGPUDirectRDMAWrites",
    "cuFuncSetAttribute",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetHandleForAddressRange",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuPointerGetAttribute",
    "cuPointerSetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamWaitValue64_v2",
    "cuStreamWriteValue64_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// Loads and initialises the driver, once in a process. Milliseconds the first time, then nothing.
pub(crate) fn load() -> Result<(), Error> {
    static LOADED: OnceLock<Result<(), Error>> = OnceLock::new();
    *LOADED.get_or_init(|| {
        // SAFETY: loads libcuda.so, whose initialisers are what any CUDA program runs.
        if !unsafe { cu::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        for symbol in SYMBOLS {
            // SAFETY: the library was found just now; the symbol is not called through this type, only looked for.
            let found = unsafe { cu::culib().get::<unsafe extern "C" fn()>(symbol.as_bytes()) };
            if found.is_err() {
                return Err(Error::DriverLacks { symbol });
            }
        }
        // SAFETY: takes no pointer; may be called by any thread and more than once.
        check("cuInit", unsafe { cu::cuInit(0) })
    })
}

/// An answer of the driver as a result.
pub(crate) fn check(call: &'static str, answer: cu::CUresult) -> Result<(), Error> {
    match answer {
        cu::CUresult::CUDA_SUCCESS => Ok(()),
        // Some drivers are found, but have no GPU to drive.
        cu::CUresult::CUDA_ERROR_NO_DEVICE => Err(Error::NoDevice { ordinal: 0, count: 0 }),
        code => Err(Error::Driver { call, code: CudaCode(code) }),
    }
}

/// Has captures of graphs not mind what this thread calls, until it is dropped.
///
/// While any thread captures, CUDA refuses calls that it takes for unsafe then, and the capture fails by them: in the capturing
/// thread, and in the mode that frameworks use in every other thread of the process too, such as an engine's. What they are
/// unsafe for is work in the stream that is captured, which waits for the graph. Nothing here waits for such work (driver
/// API, `cuThreadExchangeStreamCaptureMode`).
#[must_use = "captures mind again when this is dropped"]
pub(crate) struct Aside(cu::CUstreamCaptureMode);

impl Aside {
    pub(crate) fn step() -> Result<Self, Error> {
        let mut mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: reads and writes the one number, which is this thread's mode before.
        let exchanged = unsafe { cu::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        check("cuThreadExchangeStreamCaptureMode", exchanged).map(|()| Self(mode))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // SAFETY: as above; the number is one that the driver gave.
        let _ = unsafe { cu::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// Makes a context current on this thread until it is dropped, [aside](Aside) of captures.
#[must_use = "the context is current until this is dropped"]
pub(crate) struct Current {
    _aside: Aside,
    _pushed: Pushed,
}

impl Current {
    /// # Safety
    ///
    /// The context is not destroyed while this lives.
    pub(crate) unsafe fn enter(context: cu::CUcontext) -> Result<Self, Error> {
        // SAFETY: the context is alive, by our caller's promise.
        check("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(context) })?;
        let pushed = Pushed(());
        Ok(Self { _aside: Aside::step()?, _pushed: pushed })
    }
}

/// A context on this thread's stack.
struct Pushed(());

impl Drop for Pushed {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: takes off what `enter` put on this thread's stack: this type is not `Send` in use, as every value of
        // it is a local of one function.
        let _ = unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

#[cfg(test)]
mod tests {
    use super::SYMBOLS;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// All files of a folder, and of those in it.
    fn sources(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries
            .flat_map(|path| match path.is_dir() {
                true => sources(&path),
                false => vec![std::fs::read_to_string(&path).unwrap()],
            })
            .collect()
    }

    #[test]
    fn what_is_called_is_looked_for_first() {
        let mut called = BTreeSet::new();
        for source in sources(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))) {
            // What is named `cu::cu...` and followed by its arguments.
            for rest in source.split("cu::").skip(1) {
                let name: String =
                    rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if name.starts_with("cu") && rest[name.len()..].starts_with('(') && name != "culib"
                {
                    called.insert(name);
                }
            }
        }
        let listed: BTreeSet<String> = SYMBOLS.iter().map(|&s| s.to_owned()).collect();
        assert_eq!(called, listed);
    }
}
