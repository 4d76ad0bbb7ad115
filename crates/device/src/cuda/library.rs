//! A library of NVIDIA's, opened at run time, and the functions that are looked up in it.
//!
//! The functions of a library are looked up in the very copy that the search has found: a binding
//! that opens the library again by name may open another one.

use std::ffi::c_int;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use tilewire_core::{Error, ErrorKind, Result};

use super::environment::{DELETED, file_of};
use super::library_search::{CUBLASLT, CUBLASLT_12, Found, LibrarySpec, NCCL, NVRTC, NVSHMEM};
use super::loader::is_driver;

/// Of `dlfcn.h` on Linux: what is loaded already, or nothing.
const RTLD_NOLOAD: c_int = 4;

/// An open library. Never unloaded: tables of its functions point into it.
pub(super) struct Lib<'a> {
    lib: &'static Library,
    path: &'a Path,
    spec: &'a LibrarySpec,
}

impl<'a> Lib<'a> {
    /// Opens `path`, with its symbols for all that is opened later if `global`.
    ///
    /// # Safety
    /// The initialisers of the library must have no preconditions.
    ///
    /// # Errors
    /// `Unavailable` if it cannot be loaded, with the loader's words.
    pub unsafe fn open(path: &'a Path, spec: &'a LibrarySpec, global: bool) -> Result<Self> {
        let flags = RTLD_NOW | if global { RTLD_GLOBAL } else { RTLD_LOCAL };
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        if is_replaced(path, &maps) {
            return Self::open_loaded(path, spec, flags);
        }
        // SAFETY: the caller's contract.
        let lib = unsafe { Library::open(Some(path), flags) }.map_err(|e| {
            let text = format!("{} cannot be loaded: {}", path.display(), words(&e));
            Error::new(ErrorKind::Unavailable, text).op("cuda").hint(spec.install)
        })?;
        Ok(Self { lib: Box::leak(Box::new(lib)), path, spec })
    }

    /// The copy that the process has loaded from `path`, where another file lies now: opened by its
    /// path it would be a second one, with a state of its own. The loader knows it by the library's
    /// name.
    fn open_loaded(path: &'a Path, spec: &'a LibrarySpec, flags: c_int) -> Result<Self> {
        let name = path.file_name().unwrap_or_default();
        // SAFETY: nothing is loaded, so nothing is initialised.
        let lib = unsafe { Library::open(Some(name), flags | RTLD_NOLOAD) }.map_err(|_| {
            let text = format!("{} was replaced since this process loaded it", path.display());
            Error::new(ErrorKind::Mismatch, text).op("cuda").hint("start the process again")
        })?;
        Ok(Self { lib: Box::leak(Box::new(lib)), path, spec })
    }

    /// The function `name`.
    ///
    /// # Safety
    /// `T` must be the type of the function of that name.
    ///
    /// # Errors
    /// `Unavailable` if there is none.
    pub unsafe fn symbol<T: Copy>(&self, name: &str) -> Result<T> {
        // SAFETY: the caller's contract.
        let found = unsafe { self.lib.get::<T>(name.as_bytes()) };
        found.map(|s| *s).map_err(|e| {
            let text = format!("{} has no `{name}`: {}", self.path.display(), words(&e));
            Error::new(ErrorKind::Unavailable, text).op("cuda").hint(self.spec.install)
        })
    }

    /// The function `name`, if the library has it: newer ones have more.
    ///
    /// # Safety
    /// As [`Lib::symbol`].
    pub unsafe fn optional<T: Copy>(&self, name: &str) -> Option<T> {
        // SAFETY: the caller's contract.
        unsafe { self.symbol(name) }.ok()
    }
}

/// Returns whether what is mapped of `path` is no longer the file of that name, by the text of
/// `/proc/self/maps`.
fn is_replaced(path: &Path, maps: &str) -> bool {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_it =
        |p: &Path| maps.lines().any(|l| l.ends_with(DELETED) && file_of(l).is_some_and(|f| f == p));
    is_it(path) || is_it(&real)
}

/// Returns what the loader said: the error itself only names the call.
fn words(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

/// A library in use: which copy it is, and the table of its functions.
pub(super) struct Open<A> {
    pub found: Found,
    api: A,
}

impl<A> Deref for Open<A> {
    type Target = A;

    fn deref(&self) -> &A {
        &self.api
    }
}

/// The copy of a library that this process uses: the first one that could be opened. What fails is
/// tried again: a library may be installed, or a variable set, in between.
pub(super) struct InUse<A> {
    open: OnceLock<Open<A>>,
    opening: Mutex<()>,
}

impl<A> InUse<A> {
    pub const fn new() -> Self {
        Self { open: OnceLock::new(), opening: Mutex::new(()) }
    }

    /// The library in use, and `named` if it is given. Without one, `open` makes its table of the
    /// copy that `find` finds.
    ///
    /// # Errors
    /// What `find` and `open` say; `Mismatch` if another copy than `named` is in use.
    pub fn get(
        &self,
        named: Option<&Path>,
        find: impl Fn(Option<&Path>) -> Result<Found>,
        open: impl FnOnce(&Found) -> Result<A>,
    ) -> Result<&Open<A>> {
        if let (Some(o), None) = (self.open.get(), named) {
            return Ok(o);
        }
        let _one = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(o) = self.open.get() {
            return match named.map(|_| find(named)).transpose()? {
                Some(f) if !same_file(&f.path, &o.found.path) => Err(in_use(o, &f)),
                _ => Ok(o),
            };
        }
        let found = find(named)?;
        let api = open(&found)?;
        Ok(self.open.get_or_init(|| Open { found, api }))
    }
}

/// Loads the library whose file is named, before anything uses another copy: the driver, NVRTC,
/// cuBLASLt, NCCL or NVSHMEM, as the name of the file says. Returns where it is.
///
/// # Errors
/// `InvalidArgument` if it is none of these by its name; as
/// [`load_driver_from`](super::load_driver_from), [`load_nvrtc`](super::load_nvrtc),
/// [`load_cublaslt`](super::load_cublaslt), [`load_nccl`](super::load_nccl) and
/// [`load_nvshmem`](super::load_nvshmem).
pub fn load_library(file: &Path) -> Result<Found> {
    let named = Some(file);
    match &[NVRTC, CUBLASLT, CUBLASLT_12, NCCL, NVSHMEM].map(|s| s.is_copy(file))[..] {
        [true, ..] => super::load_nvrtc(named),
        [_, true, ..] | [_, _, true, ..] => super::load_cublaslt(named),
        [.., true, _] => super::load_nccl(named),
        [.., true] => super::load_nvshmem(named),
        _ if is_driver(file) => super::load_driver_from(file),
        _ => Err(Error::invalid("the file does not have the name of a library that can be chosen")
            .expected(
                "libcuda.so.1, ".to_owned()
                    + &[NVRTC, CUBLASLT, CUBLASLT_12, NCCL, NVSHMEM].map(|s| s.soname).join(", "),
            )
            .seen(file.display())),
    }
}

pub(super) fn same_file(a: &Path, b: &Path) -> bool {
    let real = |p: &Path| p.canonicalize().unwrap_or_else(|_| p.to_owned());
    real(a) == real(b)
}

fn in_use<A>(used: &Open<A>, wanted: &Found) -> Error {
    let text = format!("{} is in use already", used.found.path.display());
    Error::new(ErrorKind::Mismatch, text)
        .op("cuda")
        .expected(used.found.path.display())
        .seen(wanted.path.display())
        .hint("name a library before anything uses it")
}

#[cfg(test)]
mod tests {
    use super::super::library_search::How;
    use super::*;

    /// A process may have a library by another name of its folder, while an installer puts a new
    /// file there.
    #[test]
    fn a_library_that_was_replaced_is_the_loaded_one() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let make = |name: &str, soname: &str, value: u32| {
            let source = dir.path().join("a.c");
            std::fs::write(&source, format!("int twtest_value(void) {{ return {value}; }}\n"))
                .unwrap();
            let path = real.join(name);
            let mut cc = std::process::Command::new("cc");
            cc.args(["-shared", "-fPIC", &format!("-Wl,-soname,{soname}"), "-o"]);
            assert!(cc.arg(&path).arg(&source).status().unwrap().success());
            path
        };
        let value = |path: &Path| {
            let path = path.to_owned();
            // SAFETY: libraries without initialisers, and the type of their function.
            unsafe {
                let lib = Lib::open(&path, &NCCL, false)?;
                Ok::<_, Error>(lib.symbol::<unsafe extern "C" fn() -> c_int>("twtest_value")?())
            }
        };
        let path = make("libtwtest.so.1", "libtwtest.so.1", 1);
        assert_eq!(value(&link.join("libtwtest.so.1")).unwrap(), 1);
        std::fs::remove_file(&path).unwrap();
        make("libtwtest.so.1", "libtwtest.so.1", 2);
        assert_eq!(value(&path).unwrap(), 1);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(value(&path).unwrap(), 1);
        // Another name than that of its file: it cannot be found again.
        let path = make("libtwodd.so.1", "libtwother.so.1", 3);
        assert_eq!(value(&link.join("libtwodd.so.1")).unwrap(), 3);
        std::fs::remove_file(&path).unwrap();
        make("libtwodd.so.1", "libtwother.so.1", 4);
        let e = value(&path).unwrap_err();
        assert!(e.is_mismatch() && e.get_hint().is_some(), "{e}");
    }

    #[test]
    fn the_first_copy_that_opens_is_the_one_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "").unwrap();
            path
        };
        let (a, b, link) = (file("a"), file("b"), dir.path().join("link"));
        std::os::unix::fs::symlink(&a, &link).unwrap();
        let find = |named: Option<&Path>| match named {
            Some(path) => Ok(Found { path: path.to_owned(), how: How::Named }),
            None => Err(Error::new(ErrorKind::Unavailable, "not there")),
        };
        let library: InUse<u32> = InUse::new();
        // Neither error decides.
        assert!(library.get(None, find, |_| Ok(1)).err().unwrap().is_unavailable());
        let broken = library.get(Some(&b), find, |_| Err(Error::internal("no such symbol")));
        assert!(broken.err().unwrap().message().contains("symbol"));
        let first = library.get(Some(&a), find, |_| Ok(2)).unwrap();
        assert_eq!((**first, &first.found.path), (2, &a));
        // From now on it is this one, by whatever name.
        for named in [None, Some(&*a), Some(&*link)] {
            assert_eq!(**library.get(named, find, |_| Ok(3)).unwrap(), 2);
        }
        let e = library.get(Some(&b), find, |_| Ok(4)).err().unwrap();
        let said = e.to_string();
        assert!(e.is_mismatch() && e.get_hint().is_some(), "{e}");
        assert!([&a, &b].iter().all(|p| said.contains(&p.display().to_string())), "{e}");
    }
}
