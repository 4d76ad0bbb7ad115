//! Compilation at run time.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use tilewire_core::{Error, ErrorKind, Result};

use super::loader::load_nvrtc;
use crate::jit::{Compiled, Compiler, KernelSpec};

/// NVRTC as a [`Compiler`].
#[derive(Clone, Copy, Debug)]
pub struct Nvrtc;

impl Compiler for Nvrtc {
    fn version(&self) -> Result<String> {
        load_nvrtc(None)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is loaded; valid outputs.
        check(unsafe { sys::nvrtcVersion(&mut major, &mut minor) }, "nvrtcVersion")?;
        Ok(format!("nvrtc{major}.{minor}"))
    }

    fn compile(&self, spec: &KernelSpec) -> Result<Compiled> {
        load_nvrtc(None)?;
        let c = |s: &str| CString::new(s).map_err(|_| Error::invalid("a zero byte in a kernel"));
        let mut options = vec![c(&format!("--gpu-architecture={}", spec.arch))?];
        for o in KernelSpec::OPTIONS {
            options.push(c(o)?);
        }
        for (name, value) in &spec.defines {
            options.push(c(&format!("-D{name}={value}ull"))?);
        }
        let program = Program::new(&c(&spec.text)?, &c(&spec.name)?)?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: a live program; `pointers` holds that many strings, alive until the end.
        let code = unsafe {
            sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr())
        };
        if code != nvrtcResult::NVRTC_SUCCESS {
            let what = format!("compilation of `{}` for {}", spec.name, spec.arch);
            return Err(Error::internal(format!("{what}: {}", describe(code))).seen(program.log()));
        }
        Ok(Compiled { cubin: program.cubin()?, log: program.log() })
    }
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
