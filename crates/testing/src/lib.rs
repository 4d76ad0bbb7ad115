//! Shared by the tests of all crates. A test that did not run does not count as passed.
//!
//! libtest knows no test that finds out while it runs that it cannot: whoever returns has passed.
//! [`did_not_run`] notes the test and the reason in the file that [`FILE`] names, and `cargo xtask
//! test` subtracts what stands there from what passed and limits it by reason. No crate may depend
//! on this one outside of its tests; `cargo xtask tidy` looks.
//!
//! With the feature `fuzz`, the macro `fuzz!` makes a test a target of `cargo xtask fuzz`.
#![deny(unsafe_code)]

#[cfg(feature = "fuzz")]
#[expect(unsafe_code, reason = "an allocator that counts")]
mod allocations;
#[cfg(feature = "fuzz")]
pub mod fuzz;

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::panic::Location;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// In the environment: the file for tests that did not run. `cargo xtask test` sets it; without it
/// they say so on standard error.
pub const FILE: &str = "TW_DID_NOT_RUN";

/// In the environment: the file for the numbers of inputs of `fuzz!`. `cargo xtask fuzz` sets it.
pub const FUZZ_COUNTS: &str = "TW_FUZZ_COUNTS";

/// The words that each such test writes to standard error, for programs that start a test again
/// where it must run.
pub const WORDS: &str = "did not run";

/// A resource that a test lacks. `cargo xtask test` has a limit for each, by the text that
/// [`Display`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// No device, or no driver.
    Gpu,
    /// Fewer devices than ranks.
    Gpus,
    /// A device that is too old for the kernels of the test.
    Sm90,
    /// The library is not here.
    Nccl,
    /// The library is not here.
    Nvshmem,
    /// The library is not here.
    CublasLt,
    /// The library of CUDA 13 was not named.
    Nvtx,
    /// The compiler of kernels is not here.
    Nvrtc,
    /// gcc or g++.
    Compiler,
    /// A preloaded library, or a driver, that counts calls.
    Watch,
    /// The right to make namespaces of processes, mounts or users.
    Namespaces,
    /// The right to run a process as another user.
    Root,
}

impl Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "no GPU",
            Self::Gpus => "too few GPUs",
            Self::Sm90 => "no GPU of sm_90",
            Self::Nccl => "no NCCL",
            Self::Nvshmem => "no NVSHMEM",
            Self::CublasLt => "no cuBLASLt",
            Self::Nvtx => "no NVTX",
            Self::Nvrtc => "no NVRTC",
            Self::Compiler => "no gcc",
            Self::Watch => "nothing counts the calls of the driver",
            Self::Namespaces => "no right to make namespaces",
            Self::Root => "no right to be another user",
        })
    }
}

/// The calling test did not run, or not to its end; it returns behind this. Each test counts once,
/// however often it says so. On a thread that the test has started itself the place of the call
/// stands for its name.
///
/// # Panics
/// If the file cannot be written: the test would count as passed.
#[track_caller]
pub fn did_not_run(lack: Lack, why: impl Display) {
    let place = Location::caller().to_string();
    let thread = std::thread::current();
    let name = thread.name().filter(|n| *n != "main").unwrap_or(&place);
    note(std::env::var_os(FILE).as_deref().map(Path::new), name, lack, &why.to_string());
}

/// Appends `program<tab>test<tab>lack` to `file`; without one writes to standard error.
fn note(file: Option<&Path>, name: &str, lack: Lack, why: &str) {
    let Some(file) = file else {
        // Not by `eprintln!`, which libtest keeps to itself.
        let text = format!("{name} {WORDS}: {lack}: {why}\n");
        return std::io::stderr().write_all(text.as_bytes()).expect("standard error");
    };
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().display().to_string();
    let mut to = OpenOptions::new().create(true).append(true).open(file).expect("the file opens");
    // In one piece: others write there, too.
    to.write_all(format!("{program}\t{name}\t{lack}\n").as_bytes()).expect("the file is written");
}

/// Returns a port of 127.0.0.1 at which nobody listens, and which no other call of this process has
/// returned: jobs that begin at the same moment would else meet at one.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    static RETURNED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut returned = RETURNED.lock().unwrap_or_else(PoisonError::into_inner);
    // Those that were returned before stay bound until there is another one.
    let mut bound = Vec::new();
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its own address").port();
        if returned.insert(port) {
            return port;
        }
        bound.push(listener);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_returned_once() {
        let ports: BTreeSet<u16> = (0..300).map(|_| free_port()).collect();
        assert_eq!(ports.len(), 300);
    }

    #[test]
    fn each_call_is_a_line_with_program_test_and_reason() {
        let file = std::env::temp_dir().join(format!("tw-testing-{}", std::process::id()));
        note(Some(&file), "a::b", Lack::Gpu, "no driver");
        note(Some(&file), "c", Lack::Nccl, "no library\nof two lines");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split('\t').collect()).collect();
        assert_eq!(
            (lines[0][1..].to_vec(), lines[1][1..].to_vec()),
            (vec!["a::b", "no GPU"], vec!["c", "no NCCL"])
        );
        assert!(lines.len() == 2 && lines[0][0].starts_with("tilewire_testing-"), "{text}");
    }
}
