//! The process of a rank, and everything that it started.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tilewire_core::{Error, ErrorKind, Result};

use super::mark::{self, Known, Mark};
use super::{Launch, RankStatus};
use crate::rejoin;
use crate::secret_fd::{self, Handed};

/// Pause between looks at what is left of a session.
const LOOK: Duration = Duration::from_millis(10);

/// Limit for the disappearance of killed processes: those in an uninterruptible sleep never end.
const VANISH: Duration = Duration::from_secs(2);

/// A rank's process: leader of a session and process group.
///
/// It is reaped only when it is dropped: until then its number cannot name another group.
pub(super) struct RankProcess {
    pub child: Child,
    pub pidfd: OwnedFd,
    pid: Pid,
    pub status: Option<RankStatus>,
}

impl RankProcess {
    pub fn start(
        launch: &Launch,
        vars: &[(String, String)],
        (mark, secret): (Mark, Option<Arc<Handed>>),
    ) -> Result<Self> {
        let mut cmd = Command::new(&launch.program);
        cmd.args(&launch.args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A job around this one hands on what is its own.
        for name in [secret_fd::VARIABLE, rejoin::VARIABLE, rejoin::RESTARTS] {
            cmd.env_remove(name);
        }
        cmd.envs(launch.env.iter().map(|(k, v)| (k, v)));
        cmd.envs(vars.iter().map(|(k, v)| (k, v)));
        own_session(&mut cmd, mark, secret);
        let mut child = cmd.spawn().map_err(|e| {
            let name = launch.program.to_string_lossy();
            Error::new(ErrorKind::Unavailable, format!("cannot start `{name}`: {e}"))
                .hint("is it in PATH, and executable?")
                .cause(e)
        })?;
        let pid = Pid::from_child(&child);
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { child, pidfd, pid, status: None }),
            Err(e) => {
                // Without it nobody would notice the end: better not to begin.
                child.kill().ok();
                child.wait().ok();
                Err(Error::io("pidfd_open", e))
            }
        }
    }

    /// The status, if the process has ended. It stays a zombie.
    pub fn poll_status(&mut self) -> Result<Option<RankStatus>> {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = rustix::process::waitid(WaitId::Pid(self.pid), how)
            .map_err(|e| Error::io("waitid", e))?;
        self.status = status.and_then(|s| {
            let exited = s.exit_status().map(RankStatus::Exited);
            exited.or(s.terminating_signal().map(RankStatus::Signaled))
        });
        Ok(self.status)
    }

    /// Sends a signal to the rank and to what it started in its group.
    pub fn signal_group(&self, signal: Signal) {
        // It fails only if no process is left to receive it.
        rustix::process::kill_process_group(self.pid, signal).ok();
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if self.status.is_none() {
            self.signal_group(Signal::KILL);
        }
        self.child.wait().ok();
    }
}

/// Makes the child leader of a session, to be killed when the launcher dies, with the descriptor of
/// the secret, and marked.
#[allow(unsafe_code)]
fn own_session(cmd: &mut Command, mark: Mark, secret: Option<Arc<Handed>>) {
    let launcher = rustix::process::getpid();
    let prepare = move || -> std::io::Result<()> {
        rustix::process::setsid()?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before the line above: then no signal will come.
        if rustix::process::getppid() != Some(launcher) {
            return Err(rustix::io::Errno::CHILD.into());
        }
        // Where it may not be marked, the environment alone names the job.
        mark.set().ok();
        secret.as_ref().map_or(Ok(()), |s| s.keep())
    };
    // SAFETY: the closure runs in the child between fork and exec. It makes seven system calls that
    // are async-signal-safe, allocates nothing, takes no lock, and touches no memory but its copies
    // of `launcher`, `mark` and `secret`.
    unsafe {
        cmd.pre_exec(prepare);
    }
}

/// Ends everything that is left of the ranks, in their sessions and, with `also`, outside of them:
/// TERM, KILL after `grace`. Returns how many processes besides the ranks themselves had to be
/// signalled.
pub(super) fn end_all(ranks: &mut [RankProcess], grace: Duration, also: Option<&Known>) -> usize {
    let sessions: Vec<i32> = ranks.iter().map(|r| r.pid.as_raw_nonzero().get()).collect();
    let is_left = |pid: Pid| {
        session_of(pid.as_raw_nonzero().get()).is_some_and(|s| sessions.contains(&s))
            || also.is_some_and(|known| known.has(pid))
    };
    let mut signalled = HashSet::new();
    let start = Instant::now();
    loop {
        let left: Vec<Pid> = mark::processes().filter(|p| is_left(*p)).collect();
        let age = start.elapsed();
        if left.is_empty() || age > grace + VANISH {
            break;
        }
        for pid in left {
            let leader = ranks.iter().any(|r| r.pid == pid);
            if age >= grace {
                mark::signal(pid, Signal::KILL, is_left);
            } else if signalled.contains(&pid.as_raw_nonzero()) {
                continue;
            } else {
                mark::signal(pid, Signal::TERM, is_left);
            }
            if !leader {
                signalled.insert(pid.as_raw_nonzero());
            }
        }
        std::thread::sleep(LOOK);
    }
    for r in ranks {
        r.poll_status().ok();
    }
    signalled.len()
}

/// The session of a process that is alive; none for a zombie.
fn session_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // pid (name) state ppid pgrp session ...; the name may hold anything, also parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let session = fields.nth(2)?.parse().ok()?;
    (state != "Z" && state != "X").then_some(session)
}
