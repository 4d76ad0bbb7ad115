//! A process beside the launcher that ends the job if the launcher cannot.
//!
//! The kernel kills a rank when the launcher dies, but not what the rank has started: a wrapper's
//! child, or what left its session. The warden holds the other end of a pipe of the launcher's. If
//! that ends without the word that all is well, the launcher is gone, and the warden kills every
//! process that has the job's mark, or its name in its environment.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tilewire_core::{Error, Result};

use super::mark::{self, JOB, Known, Mark};

/// In the environment of a job's warden: its name.
const WARDEN: &str = "_TILEWIRE_WARDEN";

/// Pause between looks at the processes of this machine.
const LOOK: Duration = Duration::from_millis(10);
/// Processes that start others while they are killed are looked for again as long as that.
const MOST: Duration = Duration::from_secs(2);

/// The launcher's end of its warden.
pub(super) struct Warden(Option<Child>);

impl Warden {
    /// Starts `words`, a program that calls [`watch`], for the job; without words nobody watches.
    pub fn start(words: &[OsString], job: &str) -> Result<Self> {
        let Some((program, args)) = words.split_first() else { return Ok(Self(None)) };
        let mut cmd = Command::new(program);
        cmd.args(args).env(WARDEN, job).stdin(Stdio::piped());
        // A launcher may itself be part of a job. Its warden is not, or that job's warden would end
        // it together with the launcher that it watches.
        cmd.env_remove(JOB);
        cmd.stdout(Stdio::null()).stderr(Stdio::null());
        // Signals for the launcher's group, from a terminal, are not for the warden.
        cmd.process_group(0);
        let child = cmd.spawn().map_err(|e| Error::io("starting the warden of the job", e))?;
        Mark::clear(Pid::from_child(&child)).ok();
        Ok(Self(Some(child)))
    }
}

impl Drop for Warden {
    /// All is well, or has been cleaned up: the warden ends.
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        if let Some(mut pipe) = child.stdin.take() {
            // If it is gone, there is nobody to tell.
            pipe.write_all(b"q").ok();
        }
        child.wait().ok();
    }
}

/// Does a warden's work: waits for the launcher's word or end at standard input, and after an end
/// without the word kills what is left of the job. Returns how many processes that were.
///
/// # Errors
/// `Config` if this process was not started as a warden.
pub fn watch() -> Result<usize> {
    let job = std::env::var(WARDEN).map_err(|_| {
        Error::new(
            tilewire_core::ErrorKind::Config,
            "this is no warden: it is started by a launcher",
        )
    })?;
    let mut word = [0u8; 1];
    loop {
        match std::io::stdin().read(&mut word) {
            Ok(0) => return Ok(end(&job)),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(_) | Err(_) => return Ok(0),
        }
    }
}

/// Kills all processes of the job until there is none.
fn end(job: &str) -> usize {
    let (start, mut killed) = (Instant::now(), HashSet::new());
    let (known, me) = (Known::job(job), rustix::process::getpid());
    loop {
        let left: Vec<Pid> = mark::processes().filter(|p| *p != me && known.has(*p)).collect();
        if left.is_empty() || start.elapsed() > MOST {
            return killed.len();
        }
        for pid in left {
            if mark::signal(pid, Signal::KILL, |p| known.has(p)) {
                killed.insert(pid.as_raw_nonzero());
            }
        }
        std::thread::sleep(LOOK);
    }
}
