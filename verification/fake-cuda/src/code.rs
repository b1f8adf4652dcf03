//! Answers, with the numbers that `cuda.h` gives them.

use cudarc::driver::sys::CUresult;
use std::ffi::c_char;

/// What a call has to say; the error is what it answers.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Each with its name here, the driver's, and a text.
macro_rules! codes {
    ($($short:ident = $code:ident, $text:literal;)*) => {
        $(pub(crate) const $short: CUresult = CUresult::$code;)*

        /// The name and the text of an answer, each with its zero; none of those that are not given here.
        pub(crate) fn words(number: u32) -> Option<(*const c_char, *const c_char)> {
            let all = [$((CUresult::$code, concat!(stringify!($code), "\0"), concat!($text, "\0")),)*];
            let found = all.into_iter().find(|code| code.0 as u32 == number)?;
            Some((found.1.as_ptr().cast(), found.2.as_ptr().cast()))
        }
    };
}

codes! {
    SUCCESS = CUDA_SUCCESS, "no error";
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE, "invalid argument";
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY, "out of memory";
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED, "not possible in a process that was forked";
    NO_DEVICE = CUDA_ERROR_NO_DEVICE, "no GPU is visible";
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE, "no such GPU";
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT, "not possible in this context";
    PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "no way between the two GPUs";
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM, "the operating system refused";
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE, "not possible with this handle";
    NOT_FOUND = CUDA_ERROR_NOT_FOUND, "there is none of this name";
    NOT_READY = CUDA_ERROR_NOT_READY, "not done yet";
    PEER_ACCESS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "access is enabled already";
    HOST_MEMORY_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "pinned or registered already";
    HOST_MEMORY_NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "not registered";
    STREAM_CAPTURE_UNSUPPORTED = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "not possible while the stream is captured";
    ILLEGAL_STATE = CUDA_ERROR_ILLEGAL_STATE, "not possible in this state";
    STREAM_CAPTURE_WRONG_THREAD = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture is another thread's";
    CAPTURED_EVENT = CUDA_ERROR_CAPTURED_EVENT, "the event is a graph's";
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED, "not supported";
}
