//! What a launch asks of the driver, as the preloaded library of the GPU bundle tells it.

use std::path::PathBuf;

/// Names of the functions of the driver that `f` has called on this thread and that a launch must
/// not call: those that allocate, load code or wait for the device. Nothing is reported without the
/// library.
pub fn of(f: impl FnOnce()) -> Vec<String> {
    noted("", f)
}

/// What is noted in a file of this kind: in `.all` the idle driver's names of all of its functions
/// that were called, in `.kernels` those of the kernels that were launched.
pub fn noted(kind: &str, f: impl FnOnce()) -> Vec<String> {
    let Some(file) = file(kind) else {
        f();
        return Vec::new();
    };
    // The library writes where there is a file.
    std::fs::write(&file, "").unwrap();
    f();
    let calls = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    calls.lines().map(str::to_owned).collect()
}

/// Where the library tells of this thread, or is told what to do in it, if it is there.
pub fn file(kind: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("TW_CALLS_DIR")?;
    // <process>/task/<thread>
    let thread = std::fs::read_link("/proc/thread-self").unwrap();
    Some(PathBuf::from(dir).join(format!("{}{kind}", thread.file_name()?.to_str()?)))
}
