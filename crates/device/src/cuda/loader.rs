//! Finds the CUDA libraries at run time.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::{driver, nvrtc};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tilewire_core::{Error, ErrorKind, Result};

use super::error::check;

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
        let names = cudarc::get_lib_name_candidates("cuda").join(", ");
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!("the CUDA driver is not there: the loader knows none of {names}"),
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

/// Checks that the run-time compiler NVRTC is there, loading it from a Python environment or the
/// toolkit's folder if the loader does not know it. Looked up once per process.
///
/// # Errors
/// `Unavailable`, naming what was searched and what to install.
pub fn load_nvrtc() -> Result<()> {
    static STATE: OnceLock<Result<()>> = OnceLock::new();
    STATE.get_or_init(|| find_nvrtc(&nvrtc_folders())).clone()
}

pub(super) fn find_nvrtc(folders: &[PathBuf]) -> Result<()> {
    // SAFETY: as for the driver.
    let present = || unsafe { nvrtc::sys::is_culib_present() };
    if present() {
        return Ok(());
    }
    for f in folders {
        if preload(f) && present() {
            return Ok(());
        }
    }
    let list: Vec<_> = folders.iter().map(|f| f.display().to_string()).collect();
    Err(Error::new(
        ErrorKind::Unavailable,
        format!(
            "NVRTC is not there: no libnvrtc.so.13 in the loader's path, nor in {}",
            list.join(", ")
        ),
    )
    .op("cuda")
    .hint("`pip install nvidia-cuda-nvrtc==13.0.88` in the active environment, or install CUDA 13"))
}

/// Loads NVRTC from `folder`, so that a later load by name finds it.
fn preload(folder: &Path) -> bool {
    let main = folder.join("libnvrtc.so.13");
    if !main.exists() {
        return false;
    }
    // NVRTC opens its builtins by bare name: they must be loaded before it runs.
    let builtins = entries(folder).into_iter().find(|p| {
        let name = p.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libnvrtc-builtins.so.13")
    });
    builtins.into_iter().chain([main]).all(|p| {
        // SAFETY: NVRTC's initialisers have no preconditions.
        let lib = unsafe { Library::open(Some(&p), RTLD_NOW | RTLD_GLOBAL) };
        // Never unloaded: the binding keeps pointers into it.
        lib.map(std::mem::forget).is_ok()
    })
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let list = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut list: Vec<_> = list.collect();
    list.sort();
    list
}

/// Where NVRTC may lie: the toolkit, then the Python environments that the shell would use.
fn nvrtc_folders() -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut toolkits: Vec<_> =
        std::env::var_os("CUDA_HOME").map(PathBuf::from).into_iter().collect();
    toolkits.push("/usr/local/cuda".into());
    for t in toolkits {
        out.extend([t.join("lib64"), t.join("targets/x86_64-linux/lib")]);
    }
    let mut roots: Vec<_> =
        std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    roots.extend(
        std::env::split_paths(&path)
            .filter(|p| p.join("python3").exists())
            .filter_map(|p| p.parent().map(Path::to_owned)),
    );
    for python in roots.iter().flat_map(|r| entries(&r.join("lib"))) {
        let nvidia = python.join("site-packages/nvidia");
        out.extend(entries(&nvidia).iter().map(|p| p.join("lib")).filter(|p| p.is_dir()));
    }
    let mut seen = std::collections::HashSet::new();
    out.retain(|p| seen.insert(p.clone()));
    out
}
