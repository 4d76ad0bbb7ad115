//! The driver: starts a case's job, does the harm, and writes down what it sees.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::case::{Case, Devices, Random};
use super::look;
use crate::python::driver::Driver;
use crate::stages::OFF;

/// A job that has not ended so long after its harm never does; on emulated devices, whose steps
/// take seconds, after the second.
const NEVER: Duration = Duration::from_secs(40);
const NEVER_EMULATED: Duration = Duration::from_secs(200);

/// A case on its way.
pub(super) struct Act<'a> {
    program: &'a Path,
    /// The driver of devices, if there are any.
    driver: Option<&'a Driver>,
    pub(super) case: &'a Case,
    pub(super) dir: PathBuf,
    mark: String,
    pub(super) random: Random,
    /// The observations, for the judge.
    pub(super) seen: Value,
}

/// Runs a case in a folder of its own; returns what was seen.
pub fn run((program, driver): (&Path, Option<&Driver>), case: &Case) -> Value {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let dir = std::env::temp_dir().join(format!("tilewire-drill-{mark}"));
    let mut act =
        Act { program, driver, case, dir, mark, random: case.random.clone(), seen: json!({}) };
    let shm = look::names(Path::new("/dev/shm"));
    if let Err(e) = act.play() {
        act.seen["err"] = json!(format!("the driver failed: {e}"));
    }
    let (left, took) = look::left(&act.mark);
    if case.harm() == "launcher" {
        // The launcher is dead at once: what counts is when its ranks are.
        act.seen["seconds"] = json!(took);
    }
    act.seen["left"] = json!(left);
    let new: Vec<_> = look::names(Path::new("/dev/shm")).difference(&shm).cloned().collect();
    act.seen["shm"] = json!(new);
    act.seen["temp"] = json!(look::names(&act.dir.join("tmp")));
    act.seen["sockets"] = json!(look::orphans());
    act.seen["files"] = json!(act.other_files());
    std::fs::remove_dir_all(&act.dir).ok();
    act.seen
}

pub(super) type Io<T> = std::io::Result<T>;

impl Act<'_> {
    fn play(&mut self) -> Io<()> {
        std::fs::create_dir_all(self.dir.join("tmp"))?;
        match self.case.harm().as_str() {
            "kill" | "stop" | "launcher" => self.signalled(),
            "pause" => self.paused(),
            "meeting" => self.ends(&self.words(&[], &[])),
            "stalled" => self.stalled(),
            "full" => self.full(),
            "fds" => self.limited("-n"),
            "memory" => self.limited("-v"),
            "files" => self.files(),
            "stranger" => self.stranger(),
            "damage" => self.damaged(),
            "steady" => self.steady(),
            _ => self.restarted(),
        }
    }

    /// Files that the job has made and that nobody has asked it for: halves of checkpoints, unless
    /// a rank was killed while it wrote one.
    fn other_files(&self) -> Vec<String> {
        let known = ["before", "c", "err", "m", "out", "tmp", "whole"];
        let here = look::names(&self.dir).into_iter().filter(|n| !known.contains(&&**n));
        let saved = look::names(&self.dir.join("c")).into_iter();
        let whole = |n: &str| n.starts_with("step-") || n == ".lock";
        let is_half = |n: &String| !whole(n) && !self.case.kills_writers();
        here.chain(saved.filter(is_half)).collect()
    }

    /// The case's words, with others for some, and more behind them.
    pub(super) fn words(&self, other: &[(&str, &str)], more: &[&str]) -> Vec<String> {
        let of = |w: &String| {
            let found = other.iter().find(|(a, _)| w == a).map(|(_, b)| (*b).to_owned());
            let own = (w == "SELF").then(|| self.program.display().to_string());
            found.or(own).unwrap_or_else(|| w.clone())
        };
        let more = more.iter().map(|w| (*w).to_owned());
        self.case.words.iter().map(of).chain(more).collect()
    }

    fn start(&self, program: &Path, words: &[String], out: Stdio) -> Io<Child> {
        let mut c = self.command(program);
        c.args(words).current_dir(&self.dir).envs(OFF).env(look::MARK, &self.mark);
        c.env("TMPDIR", self.dir.join("tmp")).stdin(Stdio::null());
        c.stdout(out).stderr(File::options().append(true).create(true).open(self.dir.join("err"))?);
        c.spawn()
    }

    fn command(&self, program: &Path) -> Command {
        let ranks = self.case.harm["ranks"].as_u64().unwrap_or(1) as usize;
        let Some(driver) = self.driver else { return Command::new(program) };
        let mut c = driver.command(program, ranks);
        // For what some harm needs: a shell, `yes`, `unshare`.
        c.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        c
    }

    pub(super) fn job(&self, words: &[String]) -> Io<Child> {
        self.start(self.program, words, Stdio::from(File::create(self.dir.join("out"))?))
    }

    fn never(&self) -> Duration {
        if self.case.devices == Devices::Emulated { NEVER_EMULATED } else { NEVER }
    }

    /// Waits for the end of a job since `harm`, and writes it down.
    pub(super) fn end(&mut self, job: &mut Child, harm: Instant) -> Io<()> {
        let status: Option<ExitStatus> = loop {
            match job.try_wait()? {
                None if harm.elapsed() < self.never() => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                status => break status,
            }
        };
        self.seen["seconds"] = json!(harm.elapsed().as_secs_f64());
        if status.is_none() {
            job.kill()?;
            job.wait()?;
        }
        self.seen["code"] = json!(status.and_then(|s| s.code()));
        let signal = status.and_then(|s| std::os::unix::process::ExitStatusExt::signal(&s));
        self.seen["signal"] = json!(signal);
        let err = std::fs::read(self.dir.join("err"))?;
        self.seen["err"] = json!(String::from_utf8_lossy(&err));
        Ok(())
    }

    /// A job that ends by itself.
    fn ends(&mut self, words: &[String]) -> Io<()> {
        let mut job = self.job(words)?;
        self.end(&mut job, Instant::now())
    }

    /// Waits until `enough`; false if the job ends before, or does not come so far.
    pub(super) fn until(&self, job: &mut Child, enough: impl Fn() -> bool) -> Io<bool> {
        let start = Instant::now();
        while !enough() {
            if job.try_wait()?.is_some() || start.elapsed() > self.never() {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(true)
    }

    pub(super) fn steps(&self) -> usize {
        look::curve(&self.dir.join("m")).map_or(0, |c| c.len())
    }

    fn signalled(&mut self) -> Io<()> {
        let mut job = self.job(&self.words(&[], &[]))?;
        let harm = &self.case.harm;
        let (id, rank) = (job.id(), harm["rank"].as_u64());
        // A rank that is stopped before all have met ends the meeting, and not a wait.
        let is_stop = self.case.harm() == "stop";
        let has_steps = self.case.words.iter().any(|w| w == "train");
        let waits = has_steps && (is_stop || self.random.below(3) > 0);
        if waits && !self.until(&mut job, || self.steps() > 0)? {
            self.seen["early"] = json!(true);
        }
        std::thread::sleep(Duration::from_millis(self.case.delay_ms));
        let victim = match rank {
            None => Some(id),
            Some(rank) => {
                self.until(&mut job, || look::ranks(id).contains_key(&rank))?;
                look::ranks(id).get(&rank).copied()
            }
        };
        let name = match (rank, harm["name"].as_str()) {
            (None, _) => "KILL",
            (Some(_), Some(name)) => name,
            (Some(_), None) => "STOP",
        };
        let when = Instant::now();
        let hit = victim.is_some_and(|pid| send(pid, name));
        if name == "SEGV" {
            // Rust's handler takes the first for a fault that comes again; two that come before it
            // runs are one.
            for _ in 0..10 {
                std::thread::sleep(Duration::from_millis(20));
                victim.map(|pid| send(pid, name));
            }
        }
        if !hit {
            self.seen["void"] = json!(true);
        }
        self.end(&mut job, when)
    }

    /// A rank stands still for less than the deadline, and goes on.
    fn paused(&mut self) -> Io<()> {
        let mut job = self.job(&self.words(&[], &[]))?;
        let (id, rank) = (job.id(), self.case.harm["rank"].as_u64().unwrap_or(0));
        if !self.until(&mut job, || self.steps() > 0)? {
            self.seen["early"] = json!(true);
        }
        std::thread::sleep(Duration::from_millis(self.case.delay_ms));
        let victim = look::ranks(id).get(&rank).copied();
        if !victim.is_some_and(|pid| send(pid, "STOP")) {
            self.seen["void"] = json!(true);
        }
        std::thread::sleep(Duration::from_millis(self.case.harm["ms"].as_u64().unwrap_or(0)));
        victim.map(|pid| send(pid, "CONT"));
        self.ends_when_asked(&mut job, "1000000")
    }

    /// Lets a job make a few more steps, asks it to end, and compares its curve with that of a job
    /// of as many steps; `steps` is the word for them.
    fn ends_when_asked(&mut self, job: &mut Child, steps: &str) -> Io<()> {
        let before = self.steps();
        self.until(job, || self.steps() > before + 2)?;
        send(job.id(), "USR1");
        self.end(job, Instant::now())?;
        let done = self.steps().max(1).to_string();
        self.compare(&[(steps, &done)])
    }

    /// A reader that has stopped reading.
    fn stalled(&mut self) -> Io<()> {
        let words = self.words(&[], &[]);
        let mut job = self.start(self.program, &words, Stdio::piped())?;
        let pipe = job.stdout.take();
        let done = self.end(&mut job, Instant::now());
        drop(pipe);
        done
    }

    /// A file, or the file system of the checkpoints, that takes nothing more.
    fn full(&mut self) -> Io<()> {
        let is_small = self.case.words.iter().any(|w| w == "--checkpoint") && may_mount();
        if !is_small {
            return self.ends(&self.words(&[("m", "/dev/full")], &[]));
        }
        std::fs::create_dir(self.dir.join("c"))?;
        let script = "mount -t tmpfs -o size=64k tmpfs c && exec \"$0\" \"$@\"";
        let own = self.program.display().to_string();
        let head = ["--mount", "sh", "-c", script, &own].map(str::to_owned).into_iter();
        let words: Vec<_> = head.chain(self.words(&[], &[])).collect();
        let out = Stdio::from(File::create(self.dir.join("out"))?);
        let mut job = self.start(Path::new("unshare"), &words, out)?;
        self.end(&mut job, Instant::now())
    }

    fn limited(&mut self, flag: &str) -> Io<()> {
        let limit = self.case.harm["limit"].as_u64().unwrap_or(0);
        let script = format!("ulimit {flag} {limit}; exec \"$0\" \"$@\"");
        let own = self.program.display().to_string();
        let head = ["-c".to_owned(), script, own].into_iter();
        let words: Vec<_> = head.chain(self.words(&[], &[])).collect();
        let out = Stdio::from(File::create(self.dir.join("out"))?);
        let mut job = self.start(Path::new("sh"), &words, out)?;
        self.end(&mut job, Instant::now())?;
        self.compare_whole()
    }

    /// Files that may not grow any more from the first step on: symmetric memory is a file, too,
    /// and a job that has none writes no checkpoints.
    fn files(&mut self) -> Io<()> {
        let mut job = self.job(&self.words(&[], &[]))?;
        let limit = 512 * self.case.harm["limit"].as_u64().unwrap_or(0);
        if !self.until(&mut job, || self.steps() > 0)? {
            self.seen["early"] = json!(true);
        } else if !limits_files(job.id(), limit) {
            self.seen["void"] = json!(true);
        }
        self.end(&mut job, Instant::now())?;
        self.compare_whole()
    }

    /// Compares the curve of a job that has ended without an error.
    fn compare_whole(&mut self) -> Io<()> {
        if self.seen["code"] == 0 { self.compare(&[]) } else { Ok(()) }
    }

    /// Bytes of others at the job's store; some of their connections stay open.
    fn stranger(&mut self) -> Io<()> {
        let mut job = self.job(&self.words(&[], &[]))?;
        let id = job.id();
        self.until(&mut job, || !look::ports(id).is_empty())?;
        let (mut held, mut reached) = (Vec::new(), 0);
        for port in look::ports(id) {
            for _ in 0..1 + self.random.below(40) {
                let Ok(mut s) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let len = self.random.below(3000) as usize;
                let bytes: Vec<u8> = (0..len).map(|_| self.random.next() as u8).collect();
                // It may be refused before all is written.
                let sent = s.write(&bytes).unwrap_or(0);
                reached += sent;
                bytes.get(sent..).map(|rest| s.write_all(rest).ok());
                if self.random.below(2) == 0 {
                    held.push(s);
                }
            }
        }
        if reached == 0 {
            self.seen["void"] = json!(true);
        }
        self.end(&mut job, Instant::now())?;
        self.compare(&[])
    }

    /// A bit of the newest checkpoint is turned over; the job then goes on.
    fn damaged(&mut self) -> Io<()> {
        let steps = self.case.steps;
        let half = (steps / 2).to_string();
        let saves = ["--checkpoint", "c", "--every", &half];
        let mut job = self.job(&self.words(&[], &saves))?;
        if !job.wait()?.success() {
            return self.end(&mut job, Instant::now());
        }
        let newest = self.dir.join(format!("c/step-{steps:010}"));
        let files: Vec<_> = look::names(&newest).into_iter().collect();
        let name = &files[self.random.below(files.len() as u64) as usize];
        let path = newest.join(name);
        let mut bytes = std::fs::read(&path)?;
        let at = self.random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << self.random.below(8);
        std::fs::write(&path, bytes)?;
        self.seen["file"] = json!(name);
        let more = [(steps.to_string(), (steps + steps / 2).to_string())];
        let other: Vec<_> = more.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let resume = [&saves[..], &["--resume", "c"]].concat();
        let mut job = self.job(&self.words(&other, &resume))?;
        self.end(&mut job, Instant::now())?;
        self.compare(&other)
    }

    /// Ranks are killed one after the other; the job is then asked to end.
    fn restarted(&mut self) -> Io<()> {
        let mut job = self.job(&self.words(&[(&self.case.steps.to_string(), "1000000")], &[]))?;
        let (id, kills) = (job.id(), self.case.harm["kills"].as_u64().unwrap_or(0));
        let num = self.case.harm["ranks"].as_u64().unwrap_or(0);
        let mut fds = Fds::new();
        for _ in 0..kills {
            let before = self.steps();
            if !self.until(&mut job, || self.steps() > before)? {
                return self.end(&mut job, Instant::now());
            }
            if fds.is_empty() {
                fds = descriptors(id);
            }
            std::thread::sleep(Duration::from_millis(self.random.below(300)));
            let rank = self.random.below(num);
            let Some(pid) = look::ranks(id).get(&rank).copied() else { continue };
            send(pid, "KILL");
            let is_back = || {
                let now = look::ranks(id);
                now.len() as u64 == num && now.get(&rank) != Some(&pid)
            };
            self.until(&mut job, is_back)?;
        }
        let before = self.steps();
        self.until(&mut job, || self.steps() > before)?;
        self.seen["fds"] = json!(leaks(&fds, id));
        self.ends_when_asked(&mut job, &self.case.steps.to_string())
    }

    /// Compares the curve with that of the same job without harm: as threads, on a GPU as
    /// processes.
    pub(super) fn compare(&mut self, other: &[(&str, &str)]) -> Io<()> {
        if self.steps() == 0 {
            return Ok(());
        }
        let all = [&[("m", "whole")], other].concat();
        let words = self.words(&all, &[]);
        let ranks = self.case.harm["ranks"].to_string();
        // Behind a launcher: the part of its program.
        let train = words.iter().position(|w| w == "train").unwrap_or(0);
        let mut words = words[train..].to_vec();
        for flag in ["--checkpoint", "--every"] {
            if let Some(at) = words.iter().position(|w| w == flag) {
                words.drain(at..at + 2);
            }
        }
        if self.case.devices == Devices::Gpu {
            let own = self.program.display().to_string();
            words.splice(0..0, ["run".to_owned(), "-n".to_owned(), ranks, "--".to_owned(), own]);
        } else if !words.iter().any(|w| w == "--ranks") {
            words.extend(["--ranks".to_owned(), ranks]);
        }
        let mut c = self.command(self.program);
        let done = c.args(&words).current_dir(&self.dir).envs(OFF).output()?;
        let why = match done.status.success() {
            true => look::difference(&self.dir.join("m"), &self.dir.join("whole")),
            false => Some(format!("the job without harm fails: {done:?}")),
        };
        self.seen["differs"] = json!(why);
        Ok(())
    }
}

/// The launcher and its ranks: their processes and how many descriptors each has.
type Fds = BTreeMap<String, (u32, usize)>;

fn descriptors(launcher: u32) -> Fds {
    let ranks = look::ranks(launcher).into_iter().map(|(rank, pid)| (format!("rank {rank}"), pid));
    let all = ranks.chain([("launcher".to_owned(), launcher)]);
    all.map(|(who, pid)| (who, (pid, look::descriptors(pid)))).collect()
}

/// Descriptors that processes have more than in `before`, and keep: a file that a rank writes at
/// the moment of the count is closed soon.
fn leaks(before: &Fds, launcher: u32) -> Vec<String> {
    let look = || {
        let now = descriptors(launcher);
        let more = |(who, (pid, n)): (&String, &(u32, usize))| {
            let (same, m) = now.get(who)?;
            (same == pid && m > n).then(|| format!("{who}: {n}, then {m}"))
        };
        before.iter().filter_map(more).collect::<Vec<_>>()
    };
    let (mut found, start) = (look(), Instant::now());
    while !found.is_empty() && start.elapsed() < look::CLOSING {
        std::thread::sleep(Duration::from_millis(100));
        found = look();
    }
    found
}

/// True if a process may have mounts of its own.
fn may_mount() -> bool {
    let script = "mount -t tmpfs tmpfs /mnt";
    let tried = Command::new("unshare").args(["--mount", "sh", "-c", script]).output();
    tried.is_ok_and(|o| o.status.success())
}

/// Limits the files that a process writes to so many bytes; false if nobody is there.
fn limits_files(pid: u32, bytes: u64) -> bool {
    let words = [format!("--pid={pid}"), format!("--fsize={bytes}")];
    Command::new("prlimit").args(words).output().is_ok_and(|o| o.status.success())
}

/// Sends a signal by its name; false if nobody is there.
pub(super) fn send(pid: u32, name: &str) -> bool {
    let kill = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).output();
    kill.is_ok_and(|o| o.status.success())
}
