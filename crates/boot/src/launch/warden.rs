//! A process beside the launcher that ends the job if the launcher cannot.
//!
//! The kernel kills a rank when the launcher dies, but not what the rank has started: a wrapper's
//! child, or what left its session. The warden holds the other end of a pipe of the launcher's. If
//! that ends without the word that all is well, the launcher is gone, and the warden kills every
//! process that has the job's name in its environment.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};
use tilewire_core::{Error, Result};

/// In the environment of every process of a job: its name. It is no setting, so it does not begin
/// as settings do, of which unknown ones are refused.
const JOB: &str = "_TILEWIRE_JOB";
/// In that of its warden, which is none of them.
const WARDEN: &str = "_TILEWIRE_WARDEN";

/// Pause between looks at the processes of this machine.
const LOOK: Duration = Duration::from_millis(10);
/// Processes that start others while they are killed are looked for again as long as that.
const MOST: Duration = Duration::from_secs(2);

/// The variable that names the job, for its processes.
pub(super) fn variable(job: &str) -> (&'static str, String) {
    (JOB, job.to_owned())
}

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
    let (start, mut killed) = (Instant::now(), std::collections::HashSet::new());
    loop {
        let left = members(job);
        if left.is_empty() || start.elapsed() > MOST {
            return killed.len();
        }
        for pid in left {
            let Ok(fd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { continue };
            // Another process may have its number by now.
            if is_of(pid, job) && rustix::process::pidfd_send_signal(&fd, Signal::KILL).is_ok() {
                killed.insert(pid.as_raw_nonzero());
            }
        }
        std::thread::sleep(LOOK);
    }
}

fn members(job: &str) -> Vec<Pid> {
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = dir.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(Pid::from_raw).filter(|p| is_of(*p, job)).collect()
}

/// Returns whether a process that runs has the job's name. A zombie has no environment.
fn is_of(pid: Pid, job: &str) -> bool {
    let path = format!("/proc/{}/environ", pid.as_raw_nonzero());
    let want = format!("{JOB}={job}");
    std::fs::read(path).is_ok_and(|all| all.split(|b| *b == 0).any(|v| v == want.as_bytes()))
}
