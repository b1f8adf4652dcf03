//! Answers, with the numbers that `cuda.h` gives them.

use cudarc::driver::sys::CUresult;
use std::ffi::CStr;

/// What a call has to say; the error is what it answers.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

macro_rules! codes {
    ($($short:ident = $code:ident, $name:literal, $text:literal;)*) => {
        $(#[allow(dead_code, reason = "one list, for names too")] pub(crate) const $short: CUresult = CUresult::$code;)*

        /// The name and the text of one of the answers that are given here.
        pub(crate) fn words(number: u32) -> Option<(&'static CStr, &'static CStr)> {
            [$((CUresult::$code, $name, $text),)*]
                .into_iter()
                .find(|code| code.0 as u32 == number)
                .map(|code| (code.1, code.2))
        }
    };
}

codes! {
    SUCCESS = CUDA_SUCCESS, c"CUDA_SUCCESS", c"no error";
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NO_DEVICE = CUDA_ERROR_NO_DEVICE, c"CUDA_ERROR_NO_DEVICE", c"no GPU is visible";
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"no such GPU";
    INVALID_IMAGE = CUDA_ERROR_INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE", c"not an image of kernels";
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"not possible in this context";
    PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"no way between the two GPUs";
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM, c"CUDA_ERROR_OPERATING_SYSTEM", c"the operating system refused";
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"not possible with this handle";
    NOT_FOUND = CUDA_ERROR_NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"there is none of this name";
    NOT_READY = CUDA_ERROR_NOT_READY, c"CUDA_ERROR_NOT_READY", c"not done yet";
    PEER_ACCESS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"access is enabled already";
    HOST_MEMORY_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"pinned or registered already";
    HOST_MEMORY_NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"not registered";
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"not supported";
}
