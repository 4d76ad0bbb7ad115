//! A library of NVIDIA's, opened at run time, and the functions that are looked up in it.
//!
//! The functions of a library are looked up in the very copy that the search has found: a binding
//! that opens the library again by name may open another one.

use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use tilewire_core::{Error, ErrorKind, Result};

use super::places::LibrarySpec;

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
        // SAFETY: the caller's contract.
        let lib = unsafe { Library::open(Some(path), flags) }.map_err(|e| {
            let text = format!("{} cannot be loaded: {e}", path.display());
            Error::new(ErrorKind::Unavailable, text).op("cuda").hint(spec.install)
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
            let text = format!("{} has no `{name}`: {e}", self.path.display());
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
