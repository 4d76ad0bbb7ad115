//! Compilation at run time.
//!
//! The few functions of NVRTC that are needed are looked up in the very copy that the search has
//! found. A binding that opens the library again by name may open another one.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use tilewire_core::{Error, ErrorKind, Result};

use super::environment::entries;
use super::library::{InUse, Lib, Open};
use super::library_search::{Found, NVRTC, Places};
use crate::jit::{Compiled, Compiler, KernelSpec};

type Code = c_int;
type Raw = *mut c_void;

/// NVRTC's functions, as `nvrtc.h` of CUDA 13 declares them.
struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code,
    create: unsafe extern "C" fn(
        *mut Raw,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    compile: unsafe extern "C" fn(Raw, c_int, *const *const c_char) -> Code,
    cubin_size: unsafe extern "C" fn(Raw, *mut usize) -> Code,
    cubin: unsafe extern "C" fn(Raw, *mut c_char) -> Code,
    log_size: unsafe extern "C" fn(Raw, *mut usize) -> Code,
    log: unsafe extern "C" fn(Raw, *mut c_char) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    destroy: unsafe extern "C" fn(*mut Raw) -> Code,
}

impl Api {
    fn open(path: &Path) -> Result<Self> {
        let lib = preload(path)?;
        // SAFETY: the types are those of `nvrtc.h`.
        let api = unsafe {
            Self {
                version: lib.symbol("nvrtcVersion")?,
                create: lib.symbol("nvrtcCreateProgram")?,
                compile: lib.symbol("nvrtcCompileProgram")?,
                cubin_size: lib.symbol("nvrtcGetCUBINSize")?,
                cubin: lib.symbol("nvrtcGetCUBIN")?,
                log_size: lib.symbol("nvrtcGetProgramLogSize")?,
                log: lib.symbol("nvrtcGetProgramLog")?,
                error_string: lib.symbol("nvrtcGetErrorString")?,
                destroy: lib.symbol("nvrtcDestroyProgram")?,
            }
        };
        Ok(api)
    }

    fn describe(&self, code: Code) -> String {
        // SAFETY: any code has a static string.
        unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy().into_owned()
    }

    fn check(&self, code: Code, call: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Internal, format!("{call}: {}", self.describe(code))))
    }
}

/// The first part of the name of the file that NVRTC opens by bare name itself.
const BUILTINS: &str = "libnvrtc-builtins.so.13";

/// The second library, which lies beside the first.
fn builtins(main: &Path) -> Option<PathBuf> {
    let name = |p: &Path| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = main.parent().unwrap_or(main);
    entries(folder).into_iter().find(|p| name(p).starts_with(BUILTINS))
}

/// Loads the file and what lies beside it.
fn preload(main: &Path) -> Result<Lib<'_>> {
    if let Some(b) = builtins(main) {
        // SAFETY: NVRTC's initialisers have no preconditions.
        unsafe { Lib::open(&b, &NVRTC, true)? };
    }
    // SAFETY: as above.
    unsafe { Lib::open(main, &NVRTC, true) }
}

fn load(named: Option<&Path>) -> Result<&'static Open<Api>> {
    static STATE: InUse<Api> = InUse::new();
    let find = |named: Option<&Path>| Places::of_process().find(&NVRTC, named);
    STATE.get(named, find, |found| Api::open(&found.path))
}

/// Loads the run-time compiler NVRTC, from `named` (a file or its folder) if given, and returns
/// where it is.
///
/// # Errors
/// As [`Places::find`]; `Unavailable` if the file is not NVRTC; `Mismatch` if `named` is not the
/// copy that is in use.
pub fn load_nvrtc(named: Option<&Path>) -> Result<Found> {
    load(named).map(|o| o.found.clone())
}

/// NVRTC as a [`Compiler`].
#[derive(Clone, Copy, Debug)]
pub struct Nvrtc;

impl Compiler for Nvrtc {
    fn version(&self) -> Result<String> {
        let api = load(None)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: valid outputs.
        api.check(unsafe { (api.version)(&mut major, &mut minor) }, "nvrtcVersion")?;
        Ok(format!("nvrtc{major}.{minor}"))
    }

    fn compile(&self, spec: &KernelSpec) -> Result<Compiled> {
        let api = load(None)?;
        let c = |s: &str| {
            CString::new(s).map_err(|_| Error::invalid("the kernel's text contains a zero byte"))
        };
        let mut options = vec![c(&format!("--gpu-architecture={}", spec.arch))?];
        for o in KernelSpec::OPTIONS {
            options.push(c(o)?);
        }
        for (name, value) in &spec.defines {
            options.push(c(&format!("-D{name}={value}ull"))?);
        }
        let program = Program::new(api, &c(&spec.text)?, &c(&spec.name)?)?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: a live program; `pointers` holds that many strings, alive until the end.
        let code =
            unsafe { (api.compile)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if code != 0 {
            let file = &load(None)?.found.path;
            return Err(failed(code, spec, (&api.describe(code), &program.log()), file));
        }
        Ok(Compiled { cubin: program.cubin()?, log: program.log() })
    }
}

/// `NVRTC_ERROR_OUT_OF_MEMORY` of `nvrtc.h`.
const OUT_OF_MEMORY: Code = 1;
/// `NVRTC_ERROR_INVALID_OPTION`.
const INVALID_OPTION: Code = 5;
/// `NVRTC_ERROR_BUILTIN_OPERATION_FAILURE`: what is said if the second library is not there.
const NO_BUILTINS: Code = 7;

/// Options are ours but for the architecture, of which a compiler knows some. `file` is the
/// compiler's.
fn failed(code: Code, spec: &KernelSpec, (words, log): (&str, &str), file: &Path) -> Error {
    let text = format!("compilation of `{}` for {} failed: {words}\n{log}", spec.name, spec.arch);
    match code {
        INVALID_OPTION => Error::invalid(text).op("cuda").hint(
            "name an architecture that this NVRTC knows, as in sm_90a; a newer GPU needs a newer \
             NVRTC",
        ),
        NO_BUILTINS => Error::new(ErrorKind::Unavailable, text).op("cuda").hint(format!(
            "{BUILTINS} of the same version must lie beside {}: {}",
            file.display(),
            NVRTC.install
        )),
        OUT_OF_MEMORY => Error::new(ErrorKind::Exhausted, text)
            .op("cuda")
            .hint("compile fewer kernels at a time, or free memory of the host"),
        _ => Error::internal(text),
    }
}

struct Program {
    api: &'static Api,
    raw: Raw,
}

impl Program {
    fn new(api: &'static Api, text: &CStr, name: &CStr) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: valid output, two strings, no headers. The program copies what it keeps.
        let code = unsafe { (api.create)(&mut raw, text.as_ptr(), name.as_ptr(), 0, none, none) };
        api.check(code, "nvrtcCreateProgram")?;
        Ok(Self { api, raw })
    }

    fn log(&self) -> String {
        let mut len = 0;
        // SAFETY: a live program, valid outputs; the buffer has the length that was asked for.
        unsafe {
            if (self.api.log_size)(self.raw, &mut len) != 0 {
                return String::new();
            }
            let mut buf = vec![0u8; len];
            if (self.api.log)(self.raw, buf.as_mut_ptr().cast()) != 0 {
                return String::new();
            }
            String::from_utf8_lossy(&buf).trim_end_matches('\0').to_owned()
        }
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: a live, compiled program; valid output.
        let code = unsafe { (self.api.cubin_size)(self.raw, &mut len) };
        self.api.check(code, "nvrtcGetCUBINSize")?;
        let mut out = vec![0u8; len];
        // SAFETY: the buffer has the length that was asked for.
        let code = unsafe { (self.api.cubin)(self.raw, out.as_mut_ptr().cast()) };
        self.api.check(code, "nvrtcGetCUBIN")?;
        Ok(out)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once.
        unsafe { (self.api.destroy)(&mut self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_that_the_compiler_does_not_know_is_no_bug() {
        let (name, text, arch) = ("t.cu".into(), "".into(), "sm_900a".into());
        let spec = KernelSpec { name, text, defines: Vec::new(), arch };
        let file = Path::new("/x/libnvrtc.so.13");
        let e = failed(INVALID_OPTION, &spec, ("NVRTC_ERROR_INVALID_OPTION", "nvrtc: error"), file);
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains("sm_900a") && e.to_string().contains("newer NVRTC"), "{e}");
        let kind = |code, words| failed(code, &spec, (words, ""), file).kind();
        assert_eq!(kind(6, "NVRTC_ERROR_COMPILATION"), ErrorKind::Internal);
        assert_eq!(kind(OUT_OF_MEMORY, "NVRTC_ERROR_OUT_OF_MEMORY"), ErrorKind::Exhausted);
        let e = failed(NO_BUILTINS, &spec, ("NVRTC_ERROR_BUILTIN_OPERATION_FAILURE", ""), file);
        assert!(e.is_unavailable(), "{e}");
        for needle in [BUILTINS, "/x/libnvrtc.so.13", "pip install nvidia-cuda-nvrtc"] {
            assert!(e.to_string().contains(needle), "no `{needle}` in: {e}");
        }
    }
}
