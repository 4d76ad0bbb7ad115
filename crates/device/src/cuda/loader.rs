//! Finds the CUDA driver at run time.

use std::sync::OnceLock;

use cudarc::driver;
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
