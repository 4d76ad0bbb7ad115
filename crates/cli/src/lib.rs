//! The `tilewire` command as a library, so that tests and the binary run the same code.
#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
pub mod checkpoint_cmd;
pub mod doctor;
pub mod dump;
pub mod ending;
mod files;
pub mod kernels_cmd;
pub mod launch;
pub mod links;
pub mod plan_cmd;
pub mod plot;
mod progress;
pub mod rows;
pub mod topo;
pub mod trace;
pub mod train;
pub mod verify;
pub mod verify_cmd;
pub mod worlds;

use std::io::Write;
use std::sync::OnceLock;

use tilewire::core::Error;

/// The first error of standard output.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Keeps why standard output takes no more. A closed pipe is not an error: the reader has seen
/// enough.
fn kept(done: std::io::Result<()>) {
    if let Err(e) = done
        && e.kind() != std::io::ErrorKind::BrokenPipe
    {
        // Only the first counts.
        let _later = LOST.set(e);
    }
}

/// Writes a line to standard output; [`end`] tells whether that went well.
pub(crate) fn say(line: impl std::fmt::Display) {
    kept(writeln!(std::io::stdout().lock(), "{line}"));
}

/// Writes text to standard output, as `say` a line.
pub fn say_all(text: &[u8]) {
    kept(std::io::stdout().lock().write_all(text));
}

/// Standard output for others, who write into it whether it takes it or not.
pub(crate) struct Out;

impl std::io::Write for Out {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        say_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        kept(std::io::stdout().flush());
        Ok(())
    }
}

/// The exit code of a command that ends with `code`: what was to be read and could not be written
/// is an error.
pub fn end(code: i32) -> i32 {
    kept(std::io::stdout().flush());
    let Some(e) = LOST.get() else { return code };
    complain(format_args!("error: standard output: {e}: not all of it was written"));
    if code == 0 { 2 } else { code }
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
