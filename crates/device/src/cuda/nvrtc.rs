//! Compilation at run time.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use tilewire_core::{Error, ErrorKind, Result};

use super::loader::load_nvrtc;

/// Compiles CUDA C++ for `arch` (`sm_90a`) with `defines` and returns the machine code.
///
/// # Errors
/// `Unavailable` without NVRTC; `Internal` with the compiler's log.
pub fn compile(name: &str, text: &str, arch: &str, defines: &[(&str, u64)]) -> Result<Vec<u8>> {
    load_nvrtc()?;
    let c = |s: String| CString::new(s).map_err(|_| Error::invalid("a zero byte in a kernel"));
    let mut options = vec![c(format!("--gpu-architecture={arch}"))?, c("--std=c++17".to_owned())?];
    for (k, v) in defines {
        options.push(c(format!("-D{k}={v}ull"))?);
    }
    let program = Program::new(&c(text.to_owned())?, &c(name.to_owned())?)?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: a live program; `pointers` holds that many strings, alive until the end.
    let code =
        unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
    if code != nvrtcResult::NVRTC_SUCCESS {
        let text = format!("compilation of `{name}` for {arch}: {}", describe(code));
        return Err(Error::internal(text).seen(program.log()).expected("no message"));
    }
    program.cubin()
}

fn describe(code: nvrtcResult) -> String {
    // SAFETY: the library is loaded; the string is static.
    unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) }.to_string_lossy().into_owned()
}

fn check(code: nvrtcResult, call: &str) -> Result<()> {
    if code == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Internal, format!("{call}: {}", describe(code))))
}

struct Program(nvrtcProgram);

impl Program {
    fn new(text: &CStr, name: &CStr) -> Result<Self> {
        let mut p = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: valid output, two strings, no headers. The program copies what it keeps.
        let code =
            unsafe { sys::nvrtcCreateProgram(&mut p, text.as_ptr(), name.as_ptr(), 0, none, none) };
        check(code, "nvrtcCreateProgram")?;
        Ok(Self(p))
    }

    fn log(&self) -> String {
        let mut len = 0;
        // SAFETY: a live program, valid outputs; the buffer has the length that was asked for.
        unsafe {
            if sys::nvrtcGetProgramLogSize(self.0, &mut len) != nvrtcResult::NVRTC_SUCCESS {
                return String::new();
            }
            let mut buf = vec![0u8; len];
            if sys::nvrtcGetProgramLog(self.0, buf.as_mut_ptr().cast())
                != nvrtcResult::NVRTC_SUCCESS
            {
                return String::new();
            }
            String::from_utf8_lossy(&buf).trim_end_matches('\0').to_owned()
        }
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: a live, compiled program; valid output.
        check(unsafe { sys::nvrtcGetCUBINSize(self.0, &mut len) }, "nvrtcGetCUBINSize")?;
        let mut out = vec![0u8; len];
        // SAFETY: the buffer has the length that was asked for.
        check(unsafe { sys::nvrtcGetCUBIN(self.0, out.as_mut_ptr().cast()) }, "nvrtcGetCUBIN")?;
        Ok(out)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}
