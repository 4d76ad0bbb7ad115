//! Result codes of the driver as typed errors.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};
use tilewire_core::{Error, ErrorKind, Result};

/// `Ok` for success; otherwise an error that names the call.
pub(crate) fn check(code: CUresult, call: &str) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::new(kind(code), format!("{call}: {}", describe(code))))
}

fn kind(code: CUresult) -> ErrorKind {
    use CUresult as C;
    match code {
        C::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::Exhausted,
        C::CUDA_ERROR_NO_DEVICE
        | C::CUDA_ERROR_STUB_LIBRARY
        | C::CUDA_ERROR_DEVICE_UNAVAILABLE
        | C::CUDA_ERROR_SYSTEM_NOT_READY => ErrorKind::Unavailable,
        C::CUDA_ERROR_INVALID_DEVICE
        | C::CUDA_ERROR_INVALID_VALUE
        | C::CUDA_ERROR_CAPTURED_EVENT
        | C::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | C::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | C::CUDA_ERROR_STREAM_CAPTURE_MERGE
        | C::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        | C::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        | C::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        | C::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        | C::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => ErrorKind::InvalidArgument,
        C::CUDA_ERROR_NOT_SUPPORTED | C::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => {
            ErrorKind::Unsupported
        }
        C::CUDA_ERROR_NOT_PERMITTED => ErrorKind::Permission,
        C::CUDA_ERROR_ECC_UNCORRECTABLE
        | C::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | C::CUDA_ERROR_ILLEGAL_ADDRESS
        | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | C::CUDA_ERROR_MISALIGNED_ADDRESS
        | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | C::CUDA_ERROR_INVALID_PC
        | C::CUDA_ERROR_ASSERT
        | C::CUDA_ERROR_LAUNCH_TIMEOUT
        | C::CUDA_ERROR_LAUNCH_FAILED
        | C::CUDA_ERROR_EXTERNAL_DEVICE
        | C::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | C::CUDA_ERROR_HARDWARE_STACK_ERROR
        | C::CUDA_ERROR_DEINITIALIZED => ErrorKind::DeviceLost,
        _ => ErrorKind::Internal,
    }
}

fn describe(code: CUresult) -> String {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: `code` came from the driver, so it is loaded; both outputs are valid pointers, and
    // the strings that come back are static.
    unsafe {
        if sys::cuGetErrorName(code, &mut name) != CUresult::CUDA_SUCCESS
            || sys::cuGetErrorString(code, &mut text) != CUresult::CUDA_SUCCESS
        {
            return format!("{code:?}");
        }
        format!(
            "{} ({})",
            CStr::from_ptr(text).to_string_lossy(),
            CStr::from_ptr(name).to_string_lossy()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_to_be_had_is_no_bug() {
        for code in [CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE, CUresult::CUDA_ERROR_SYSTEM_NOT_READY]
        {
            assert_eq!(kind(code), ErrorKind::Unavailable);
        }
        assert_eq!(kind(CUresult::CUDA_ERROR_OUT_OF_MEMORY), ErrorKind::Exhausted);
        assert_eq!(kind(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), ErrorKind::DeviceLost);
    }
}
