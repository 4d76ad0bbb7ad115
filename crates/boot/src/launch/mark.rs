//! The mark by which processes of a job are known.
//!
//! A rank's environment names its job, and so does that of what it starts, unless somebody clears
//! it. A mark cannot be lost like that: it is a resource limit, which every child inherits, also
//! over a new session, an exec, or the death of its parents. Of all limits that of file locks
//! (`RLIMIT_LOCKS`) has no meaning to Linux since version 2.4, so its soft value is free to be a
//! name. It takes no privilege, and a launcher inside of a job marks its own ranks anew. A process
//! that changes this limit leaves its job, as a daemon may wish to.

use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, prlimit, setrlimit};

/// In the environment of every process of a job: its name. It is no setting, so it does not begin
/// as settings do, of which unknown ones are refused.
pub(super) const JOB: &str = "_TILEWIRE_JOB";

/// In that of a rank: its number.
pub(super) const RANK: &str = "RANK";

/// The line of `/proc/PID/limits` that has the mark.
const LINE: &str = "Max file locks";

/// Set in every mark; no sane limit has it.
const MARKED: u64 = 1 << 62;

/// Bits of a mark that hold the rank.
const RANK_BITS: u32 = 8;

/// Names a job, and one rank of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mark(u64);

impl Mark {
    /// The mark of a rank of the job with this name.
    pub fn of(job: &str, rank: u32) -> Self {
        let hash = blake3::hash(job.as_bytes());
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hash.as_bytes()[..8]);
        let job = u64::from_le_bytes(bytes) << RANK_BITS & (MARKED - 1);
        Self(MARKED | job | u64::from(rank) & ((1 << RANK_BITS) - 1))
    }

    /// True for marks of two ranks of one job.
    pub fn is_of_job(self, other: Self) -> bool {
        self.0 >> RANK_BITS == other.0 >> RANK_BITS
    }

    /// Marks this process. For a child between fork and exec: two system calls, nothing else.
    pub fn set(self) -> std::io::Result<()> {
        let hard = getrlimit(Resource::Locks).maximum;
        Ok(setrlimit(Resource::Locks, Rlimit { current: Some(self.0), maximum: hard })?)
    }

    /// Takes the mark of a job around this one from a child.
    pub fn clear(child: Pid) -> std::io::Result<()> {
        let hard = getrlimit(Resource::Locks).maximum;
        prlimit(Some(child), Resource::Locks, Rlimit { current: hard, maximum: hard })?;
        Ok(())
    }

    /// The mark of a process that lives.
    pub fn read(pid: Pid) -> Option<Self> {
        let limits =
            std::fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero())).ok()?;
        let line = limits.lines().find_map(|l| l.strip_prefix(LINE))?;
        let soft: u64 = line.split_whitespace().next()?.parse().ok()?;
        (soft & MARKED != 0 && soft >> 63 == 0 && lives(pid)).then_some(Self(soft))
    }
}

/// A job, or one rank of it, whose processes are looked for.
#[derive(Clone, Debug)]
pub(super) struct Known {
    mark: Mark,
    /// Lines of the environment.
    lines: Vec<String>,
    whole_job: bool,
}

impl Known {
    /// The processes of the job.
    pub fn job(job: &str) -> Self {
        Self { mark: Mark::of(job, 0), lines: vec![format!("{JOB}={job}")], whole_job: true }
    }

    /// Those of one rank.
    pub fn rank(job: &str, rank: u32) -> Self {
        let lines = vec![format!("{JOB}={job}"), format!("{RANK}={rank}")];
        Self { mark: Mark::of(job, rank), lines, whole_job: false }
    }

    /// True if the process has the mark, or the environment: one that has cleared its environment,
    /// or that may not be marked, is known as well. A zombie has neither.
    pub fn has(&self, pid: Pid) -> bool {
        let fits = |m: Mark| if self.whole_job { m.is_of_job(self.mark) } else { m == self.mark };
        Mark::read(pid).is_some_and(fits) || self.is_named(pid)
    }

    fn is_named(&self, pid: Pid) -> bool {
        let Ok(all) = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) else {
            return false;
        };
        let has = |line: &String| all.split(|b| *b == 0).any(|v| v == line.as_bytes());
        self.lines.iter().all(has)
    }
}

/// True unless the process has ended, and waits for its parent to see it.
fn lives(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // pid (name) state ...; the name may hold anything, also parentheses.
    let state = stat.as_ref().ok().and_then(|s| s.rsplit_once(')')?.1.trim_start().chars().next());
    state.is_some_and(|s| s != 'Z' && s != 'X')
}

/// All processes that can be seen.
pub(super) fn processes() -> impl Iterator<Item = Pid> {
    let dir = std::fs::read_dir("/proc").into_iter().flatten();
    let numbers = dir.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok());
    numbers.filter_map(Pid::from_raw)
}

/// Signals a process if it `is_right` still: another one may have its number by now. True if it
/// was sent.
pub(super) fn signal(pid: Pid, signal: Signal, is_right: impl Fn(Pid) -> bool) -> bool {
    let Ok(fd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return false };
    is_right(pid) && rustix::process::pidfd_send_signal(&fd, signal).is_ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{WaitId, WaitIdOptions, getpid, waitid};

    use super::*;

    #[test]
    fn marks_name_job_and_rank() {
        let (a, b) = (Mark::of("a", 3), Mark::of("a", 63));
        assert!(a != b && a.is_of_job(b) && !a.is_of_job(Mark::of("b", 3)));
        // Beyond what anybody would set, and below what stands for no limit.
        assert!((MARKED..1 << 63).contains(&a.0));
    }

    #[test]
    fn a_mark_is_read_from_processes_that_live_and_can_be_taken_off() {
        let mark = Mark::of("job", 5);
        let mut child = Command::new("sleep").arg("60").env_clear().spawn().unwrap();
        let pid = Pid::from_child(&child);
        let known = [Known::job("job"), Known::rank("job", 5), Known::rank("job", 4)];
        let seen = || (Mark::read(pid), known.each_ref().map(|k| k.has(pid)));
        assert_eq!(seen(), (None, [false; 3]));
        let limit = Rlimit { current: Some(mark.0), maximum: getrlimit(Resource::Locks).maximum };
        prlimit(Some(pid), Resource::Locks, limit).unwrap();
        assert_eq!(seen(), (Some(mark), [true, true, false]));
        Mark::clear(pid).unwrap();
        assert_eq!(seen(), (None, [false; 3]));
        prlimit(Some(pid), Resource::Locks, limit).unwrap();
        child.kill().unwrap();
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        assert_eq!(seen(), (None, [false; 3]), "a zombie");
        child.wait().unwrap();
        assert_eq!(Mark::read(getpid()), None);
    }
}
