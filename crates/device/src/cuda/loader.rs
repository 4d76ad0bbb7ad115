//! Finds the CUDA driver at run time.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tilewire_core::{Error, ErrorKind, Result};

use super::environment::file_of;
use super::error::check;
use super::library::same_file;
use super::library_search::{Found, How, Places};

/// The names by which the binding opens the driver, in its order. Where another crate of the
/// program links the driver, the loader has it by the second.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Opens the driver by the first of its names that the loader knows.
fn open() -> Option<Library> {
    // SAFETY: opening libcuda runs its initialisers, which any CUDA program does.
    NAMES.into_iter().find_map(|name| unsafe { Library::open(Some(name), RTLD_NOW) }.ok())
}

/// Checks that the driver is there and finds a device. Looked up once per process.
///
/// # Errors
/// `Unavailable`, naming what was searched and what to install.
pub fn available() -> Result<()> {
    static STATE: OnceLock<Result<()>> = OnceLock::new();
    STATE.get_or_init(load_driver).clone()
}

/// Loads the CUDA driver from `file` (or the libcuda.so.1 of that folder), before anything uses
/// another copy. Whether it finds a device is not asked here.
///
/// # Errors
/// `Mismatch` if another copy is loaded; `Unavailable` if the file is no driver that can be loaded.
pub fn load_driver_from(file: &Path) -> Result<Found> {
    let file = if file.is_dir() { file.join("libcuda.so.1") } else { file.to_owned() };
    only(&file)?;
    // SAFETY: opening libcuda runs its initialisers, which any CUDA program does.
    let library = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|e| {
        Error::new(ErrorKind::Unavailable, format!("{} cannot be loaded: {e}", file.display()))
            .op("cuda")
            .hint("name the libcuda.so.1 of the driver that runs (`ldconfig -p | grep libcuda`)")
    })?;
    // It stays: the binding has it by its name.
    std::mem::forget(library);
    // The loader gives out what is loaded for the name that a driver has for itself.
    if open().is_none() {
        let text = format!("{} does not call itself libcuda.so.1", file.display());
        return Err(Error::new(ErrorKind::Unavailable, text)
            .op("cuda")
            .hint("name the file of NVIDIA's driver"));
    }
    only(&file)?;
    // Its first name is another one, of which the loader may know another file.
    let used = bound().unwrap_or_else(|| file.clone());
    if !same_file(&used, &file) {
        return Err(two_copies(&used, &file));
    }
    Ok(Found { path: file, how: How::Named })
}

/// The file that the binding will open: of its names the first that can be.
fn bound() -> Option<PathBuf> {
    let library = open()?;
    // SAFETY: a function, of which the address alone is looked at.
    let at = unsafe { library.get::<unsafe extern "C" fn()>(b"cuInit").ok()?.into_raw() };
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    file_at(&maps, at.addr())
}

/// The file whose bytes are mapped at an address, by the text of `/proc/self/maps`.
fn file_at(maps: &str, at: usize) -> Option<PathBuf> {
    let line = maps.lines().find(|l| {
        let range = l.split_whitespace().next().and_then(|r| r.split_once('-'));
        let hex = |s: &str| usize::from_str_radix(s, 16).unwrap_or(0);
        range.is_some_and(|(from, to)| (hex(from)..hex(to)).contains(&at))
    })?;
    file_of(line)
}

/// True for a file of the driver, whatever its version.
pub(super) fn is_driver(file: &Path) -> bool {
    file.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libcuda.so"))
}

/// Fails if the process has loaded another driver than `file`.
fn only(file: &Path) -> Result<()> {
    let loaded = Places::of_process().loaded.into_iter();
    let Some(other) = loaded.filter(|p| is_driver(p)).find(|p| !same_file(p, file)) else {
        return Ok(());
    };
    Err(two_copies(&other, file))
}

fn two_copies(other: &Path, file: &Path) -> Error {
    let text = format!("two copies of the CUDA driver: {} is the one in use", other.display());
    Error::new(ErrorKind::Mismatch, text).op("cuda").expected(other.display()).seen(file.display()).hint(
        "name the driver before anything uses another, and put its folder, with a link libcuda.so, first in \
         LD_LIBRARY_PATH",
    )
}

fn load_driver() -> Result<()> {
    // The binding panics when it finds no library, so nothing may call it before this look.
    if open().is_none() {
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
    let code = unsafe { driver::sys::cuInit(0) };
    check(code, "cuInit").map_err(|e| not_begun(code, e))?;
    let mut version = 0;
    // SAFETY: the driver is initialised; the output is valid.
    check(unsafe { driver::sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
    new_enough(version)
}

/// Returns the error for a driver that does not initialise, with a hint by its code.
fn not_begun(code: driver::sys::CUresult, e: Error) -> Error {
    use driver::sys::CUresult as C;
    let (what, hint) = match code {
        C::CUDA_ERROR_NO_DEVICE => (
            "finds no device",
            "look at `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, and start a container with `--gpus all`",
        ),
        C::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | C::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => (
            "and the kernel's module are of versions that do not fit: one of them is too old",
            "install NVIDIA's driver, 580 or newer, on the host, and reboot after an update; in a container, take \
             the folder `compat` out of LD_LIBRARY_PATH",
        ),
        C::CUDA_ERROR_SYSTEM_NOT_READY => (
            "waits for the machine's NVSwitches",
            "start the fabric manager (`systemctl start nvidia-fabricmanager`), of the driver's very version",
        ),
        C::CUDA_ERROR_STUB_LIBRARY => (
            "is a stub to link with",
            "take folders named `stubs` out of LD_LIBRARY_PATH; in a container, start it with `--gpus all`",
        ),
        C::CUDA_ERROR_OPERATING_SYSTEM | C::CUDA_ERROR_UNKNOWN => (
            "is refused by the operating system",
            "/dev/nvidia* and /dev/nvidia-uvm must be there and yours: `nvidia-modprobe -u -c 0` makes them, and \
             `--gpus all` brings them into a container; else look at `dmesg`",
        ),
        _ => ("does not begin", "see whether `nvidia-smi` runs, and what `dmesg` says"),
    };
    let text = format!("the CUDA driver {what}: {}", e.message());
    Error::new(ErrorKind::Unavailable, text)
        .op("cuda")
        .cause(e)
        .hint(format!("{hint}; or use the `host` backend"))
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
    fn the_file_of_an_address_is_found() {
        let maps = "1000-2000 r-xp 00000000 08:01 7 /lib/a b.so\n2000-3000 rw-p 00000000 00:00 0\n";
        assert_eq!(file_at(maps, 0x1fff), Some("/lib/a b.so".into()));
        assert_eq!(file_at(maps, 0x2000), None);
        assert_eq!(file_at(maps, 0x3000), None);
    }

    #[test]
    fn why_the_driver_does_not_begin_is_told() {
        use driver::sys::CUresult as C;
        for (code, text, hint) in [
            (C::CUDA_ERROR_NO_DEVICE, "finds no device", "CUDA_VISIBLE_DEVICES"),
            (C::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "too old", "580"),
            (C::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "too old", "compat"),
            (C::CUDA_ERROR_SYSTEM_NOT_READY, "NVSwitches", "nvidia-fabricmanager"),
            (C::CUDA_ERROR_STUB_LIBRARY, "stub", "LD_LIBRARY_PATH"),
            (C::CUDA_ERROR_OPERATING_SYSTEM, "operating system", "/dev/nvidia-uvm"),
            (C::CUDA_ERROR_OUT_OF_MEMORY, "does not begin", "nvidia-smi"),
        ] {
            let e = not_begun(code, Error::internal("cuInit: why"));
            assert!(e.is_unavailable() && e.message().contains(text), "{e}");
            assert!(e.message().contains("cuInit: why"), "{e}");
            assert!(e.get_hint().is_some_and(|h| h.contains(hint) && h.contains("`host`")), "{e}");
        }
    }

    #[test]
    fn an_old_driver_is_told_what_to_install() {
        new_enough(13000).unwrap();
        new_enough(13020).unwrap();
        let e = new_enough(12080).unwrap_err();
        assert!(e.is_unavailable() && e.get_hint().is_some_and(|h| h.contains("580")), "{e}");
        assert!(e.to_string().contains("CUDA 12.8"), "{e}");
    }
}
