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
    })?;
    let mut version = 0;
    // SAFETY: the driver is initialised; the output is valid.
    check(unsafe { driver::sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    new_enough(version)
}

/// The CUDA version, as the driver writes it, whose calls and machine code are used.
const MIN_VERSION: i32 = 13000;

fn new_enough(version: i32) -> Result<()> {
    if version >= MIN_VERSION {
        return Ok(());
    }
    let text = |v: i32| format!("CUDA {}.{}", v / 1000, v % 1000 / 10);
    Err(Error::new(ErrorKind::Unavailable, "the CUDA driver is too old for this device layer")
        .op("cuda")
        .expected(format_args!("{} or newer", text(MIN_VERSION)))
        .seen(text(version))
        .hint(
            "install NVIDIA's driver, 580 or newer (Debian and Ubuntu: `apt install \
             nvidia-driver-580-server`), or use the `host` backend",
        ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_told_what_to_install() {
        new_enough(13000).unwrap();
        new_enough(13020).unwrap();
        let e = new_enough(12080).unwrap_err();
        assert!(e.is_unavailable() && e.get_hint().is_some_and(|h| h.contains("580")), "{e}");
        assert!(e.to_string().contains("CUDA 12.8"), "{e}");
    }
}
