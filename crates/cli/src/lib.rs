//! The `tilewire` command as a library, so that tests and the binary run the same code.
#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
pub mod bench_cmd;
mod bench_device;
mod bench_ep;
pub mod bench_flags;
mod bench_products;
pub mod doctor;
pub mod dump;
pub mod kernels_cmd;
pub mod launch;
pub mod links;
pub mod plot;
pub mod rows;
pub mod topo;
pub mod trace;
pub mod train;
pub mod verify;
pub mod verify_cmd;
pub mod worlds;

use std::io::Write;

use tilewire::core::Error;

/// Writes a line to standard output. A closed pipe is not an error worth a message: the reader
/// has seen enough.
pub(crate) fn say(line: impl std::fmt::Display) {
    writeln!(std::io::stdout().lock(), "{line}").ok();
}

/// Writes a line to standard error.
pub fn complain(line: impl std::fmt::Display) {
    writeln!(std::io::stderr().lock(), "{line}").ok();
}

/// Prints an error for people, with its kind and what to do.
pub fn report(e: &Error) {
    complain(format_args!("error: {e}"));
}

/// Prints the variables that tilewire reads, with their values. Secrets are not shown.
pub fn env_table() {
    for (name, what) in tilewire::core::Config::VARIABLES {
        let value = match std::env::var_os(name) {
            None => "(not set)".to_owned(),
            Some(_) if name == "TILEWIRE_SECRET" => "(set)".to_owned(),
            Some(v) => v.to_string_lossy().into_owned(),
        };
        say(format_args!("{name:<22} {value:<16} {what}"));
    }
}
