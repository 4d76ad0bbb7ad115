//! Finds the CUDA libraries at run time.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::{driver, nvrtc};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tilewire_core::{Error, ErrorKind, Result};

use super::error::check;
use super::places::{Found, NVRTC, Places, entries};

/// Checks that the driver is there and finds a device. Looked up once per process.
///
/// # Errors
/// `Unavailable`, naming what was searched and what to install.
pub fn available() -> Result<()> {
    static STATE: OnceLock<Result<()>> = OnceLock::new();
    STATE.get_or_init(load_driver).clone()
}

fn load_driver() -> Result<()> {
    // The binding panics when it finds no library, so nothing may call it before this look.
    // SAFETY: opening libcuda runs its initialisers, which any CUDA program does.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(Error::new(
            ErrorKind::Unavailable,
            "the CUDA driver is not there: the loader knows no libcuda.so.1",
        )
        .op("cuda")
        .hint(
            "install NVIDIA's driver, 580 or newer (Debian and Ubuntu: `apt install \
             nvidia-driver-580-server`); in a container, start it with `--gpus all`; or use the \
             `host` backend, which runs everywhere",
        ));
    }
    // SAFETY: the library is there; 0 is the only legal flag.
    check(unsafe { driver::sys::cuInit(0) }, "cuInit").map_err(|e| {
        Error::new(
            ErrorKind::Unavailable,
            format!("the CUDA driver finds no device: {}", e.message()),
        )
        .op("cuda")
        .cause(e)
        .hint("look at `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or use the `host` backend")
    })
}

/// Loads the run-time compiler NVRTC, from `named` if given, and returns where it is. The first
/// call of a process decides.
///
/// # Errors
/// As [`Places::find`]; `Mismatch` if `named` is not the copy that is in use.
pub fn load_nvrtc(named: Option<&Path>) -> Result<Found> {
    static STATE: Mutex<Option<Found>> = Mutex::new(None);
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let found = Places::of_process().find(&NVRTC, named)?;
    if state.is_none() {
        preload(&found.path)?;
        // SAFETY: opening NVRTC has no preconditions.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            let text = format!("{} was loaded and is not found by name", found.path.display());
            return Err(Error::new(ErrorKind::Unavailable, text).op("cuda"));
        }
        *state = Some(found);
    }
    state.clone().ok_or_else(|| Error::internal("NVRTC was just found"))
}

/// Loads the file, so that a later load by name finds it. What it opens by bare name itself lies
/// beside it and must be loaded before.
fn preload(main: &Path) -> Result<()> {
    let name = |p: &Path| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = main.parent().unwrap_or(main);
    let builtins =
        entries(folder).into_iter().find(|p| name(p).starts_with("libnvrtc-builtins.so.13"));
    for p in builtins.iter().map(PathBuf::as_path).chain([main]) {
        // SAFETY: NVRTC's initialisers have no preconditions.
        let lib = unsafe { Library::open(Some(p), RTLD_NOW | RTLD_GLOBAL) };
        let lib = lib.map_err(|e| {
            let text = format!("{} cannot be loaded: {e}", p.display());
            Error::new(ErrorKind::Unavailable, text).op("cuda")
        })?;
        // Never unloaded: the binding keeps pointers into it.
        std::mem::forget(lib);
    }
    Ok(())
}
