//! Faults of ranks that are processes: the last rank is stopped (SIGSTOP) or killed (SIGKILL), or
//! ends, while the others wait for it inside an operation. Their error names it, they have no
//! results, and go on as a new team.
//!
//! The test starts this program again, once for each rank, in the role of a rank. Ranks and test
//! speak through files of one folder. There are more ranks than GPUs where that takes: the rest is
//! a team, too. Processes that share one take turns there, those that are stopped as well: their
//! kernels are not.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tilewire_boot::{Flags, Secret, detect, join_processes};
use tilewire_core::{BackendKind, Config, DType, Deadline, Error, ErrorKind, Rank, Result, Shape};
use tilewire_device::cuda::{CudaContext, device_count};
use tilewire_device::{Device, Stream, Tensor};
use tilewire_symm::{Heap, HeapCfg, LiveTeam, World, WorldCfg};
use tilewire_testing::{Lack, did_not_run, free_port};

use crate::team_ops::{Make, Op, asked, by_puts, ranks_asked};
use crate::{DEVICES, all_poison, expected};

/// In the environment of a rank: `kill, stop or leave|folder|operation:launches of the victim,...`.
const ROLE: &str = "TW_FAULT_ROLE";
const FOREVER: Duration = Duration::from_secs(30);
/// Jobs of ranks that are stopped, beside each other, because each takes as long as its deadline.
const SIDE_BY_SIDE: usize = 3;
/// A process ends by itself before whoever runs the test ends it.
const LIFE: Duration = Duration::from_secs(56);
/// How late the error may come: behind the deadline, or the death.
const LATE: Duration = Duration::from_millis(1500);

fn emulated() -> bool {
    std::env::var_os("TW_EMU_TEXTS").is_some()
}

/// The same where devices are emulated, which take turns on few processors.
fn how_late() -> Duration {
    if emulated() { LATE * 10 } else { LATE }
}

/// How long a wait for a rank that is stopped lasts. What loads code has been done before. CI has
/// no time for the emulated ones.
fn stopped() -> Duration {
    Duration::from_millis(if emulated() { 1500 } else { 10_000 })
}

/// Seed of the launch behind a fault: no rank had such inputs in the launch that ended.
const AGAIN: u64 = 70;
/// From "I launch now" to the signal.
const INSIDE: Duration = Duration::from_millis(300);

/// One operation of each way of waiting, with how many of its launches the victim makes:
/// collectives by one kernel and by copy engines, products, dispatch and combine of `ep`, forward
/// and backward of attention.
const KILLS: [(usize, usize); 8] =
    [(2, 0), (4, 0), (6, 0), (9, 0), (15, 1), (15, 2), (19, 1), (20, 0)];

fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

/// Until `done`; whether it came to that.
fn wait_for(most: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > most {
            return false;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    true
}

/// Written whole or not at all.
fn put(folder: &Path, name: &str, text: &str) {
    let new = folder.join(format!("{name}.new"));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

/// What a rank's log says while it waits.
static LATE_WORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Words;

impl log::Log for Words {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let text = record.args().to_string();
        if text.contains("has waited") {
            LATE_WORDS.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        }
    }

    fn flush(&self) {}
}

/// What a rank does; no test of its own.
#[test]
#[ignore = "run by the tests below"]
fn role_of_a_process() {
    let role = std::env::var(ROLE).unwrap();
    // A test that was ended leaves no ranks behind, one that is stopped among them.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let parent = std::os::unix::process::parent_id();
    std::thread::spawn(move || {
        wait_for(LIFE, || std::os::unix::process::parent_id() != parent);
        std::process::exit(3);
    });
    let parts: Vec<&str> = role.split('|').collect();
    let folder = PathBuf::from(parts[1]);
    let place =
        detect(&Flags::of_process(), &std::env::vars().collect::<BTreeMap<_, _>>()).unwrap();
    let config = Config::from_env().unwrap();
    // Contexts take their time: kept from here on, before anybody's deadline runs.
    let _ctx = CudaContext::new(place.rank.get() % device_count().unwrap().max(1)).unwrap();
    // Two worlds of the same processes: what is learned before the fault must not run into its
    // deadline.
    let world = |timeout: Duration| {
        let mesh = join_processes(&place, &config, Deadline::after_s(30.0)).unwrap();
        // Long before the deadline of who waits for a rank that is stopped.
        World::join(mesh, WorldCfg { timeout, late_warning: stopped() / 3, ..WorldCfg::default() })
    };
    assert!(log::set_logger(&Words).is_ok());
    log::set_max_level(log::LevelFilter::Warn);
    let timeout = if parts[0] == "stop" { stopped() } else { FOREVER };
    let (calm, short) = (world(FOREVER), world(timeout));
    let me = short.rank().get();
    for (at, item) in parts[2].split(',').enumerate() {
        let (i, launches) = item.split_once(':').unwrap();
        let (i, launches) = (i.parse::<usize>().unwrap(), launches.parse().unwrap());
        let case = Case { at, launches, make: by_puts()[i], folder: &folder };
        let report = case.run(&calm, &short).unwrap_or_else(|e| json!({ "failed": e.to_string() }));
        put(&folder, &format!("report.{at}.{me}"), &report.to_string());
    }
}

/// A fault in one operation, on one rank.
struct Case<'a> {
    /// Which of this job.
    at: usize,
    /// How many of its launches the victim makes before it stops.
    launches: usize,
    make: Make,
    folder: &'a Path,
}

fn heap_of(team: &LiveTeam) -> Result<(Heap, Stream)> {
    let heap = team.heap(BackendKind::Vmm, HeapCfg::new(600 << 20))?;
    let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
    Ok((heap, Stream::on(&ctx)?))
}

impl Case<'_> {
    fn run(&self, calm: &World, short: &World) -> Result<Value> {
        let (me, num) = (calm.rank(), calm.size());
        let victim = Rank::new(num as u32 - 1);
        let rest: Vec<Rank> = Rank::all(num).filter(|r| *r != victim).collect();
        let (name, want) = (format!("op{}", self.at), self.before(calm, &rest)?);
        let team = short.everyone(&name)?;
        let (heap, stream) = heap_of(&team)?;
        let op = (self.make)(&heap, &stream)?;
        op.refill(6 + u64::from(me.get()))?;
        team.agree(true)?;
        // All memory then has what a stale result would be made of.
        (op.launch)(&stream)?;
        stream.synchronize()?;
        team.check()?;
        assert!(!op.outs.iter().all(all_poison), "{}: nothing ran", op.name);
        op.poison()?;
        team.agree(true)?;
        let inside = || put(self.folder, &format!("inside.{}.{}", self.at, me.get()), "");
        if me == victim {
            return self.park(&op, (&team, &stream), inside);
        }
        inside();
        let words =
            || std::mem::take(&mut *LATE_WORDS.lock().unwrap_or_else(PoisonError::into_inner));
        words();
        let start = Instant::now();
        let queued = (op.launch)(&stream);
        stream.synchronize()?;
        heap.copy_stream()?.synchronize()?;
        // A thread of this process reports a death, and the kernels' end may overtake it.
        wait_for(how_late(), || team.check().is_err());
        let (e, at_ms, took) = (queued.and_then(|()| team.check()), now_ms(), start.elapsed());
        let late = words();
        let Err(e) = e else {
            return Err(Error::internal(format!("{}: no error on rank {}", op.name, me.get())));
        };
        // What the launches that were complete have made stays: routing and dispatch, or the
        // forward pass.
        let from = match (op.name, self.launches) {
            (_, 0) => 0,
            ("ep", _) => 3,
            _ => 2,
        };
        let poisoned = op.outs[from..].iter().all(no_result);
        // The context: a copy there and back, and then whatever the operation launches.
        let v: Vec<f32> = (0..1000u16).map(f32::from).collect();
        let copied = Tensor::from_f32(&v, DType::F32, Shape::d1(v.len()))?.to(&heap.device())?;
        let alive = copied.to_f32()? == v;
        let team = short.team(&rest, &name)?.ok_or_else(|| Error::internal("not in the rest"))?;
        let same = self.results(&team)? == want;
        Ok(json!({
            "op": op.name, "rank": me.get(), "error": e.to_json(), "at_ms": at_ms, "took_ms": took.as_millis() as u64,
            "poisoned": poisoned, "context_alive": alive, "same_as_before": same, "go_on": team.size(), "late": late,
        }))
    }

    /// What the rest computes while all is well. Everybody has launched the operation then: its
    /// code is there.
    fn before(&self, calm: &World, rest: &[Rank]) -> Result<Vec<Vec<u8>>> {
        let team = calm.everyone(&format!("warm{}", self.at))?;
        let (heap, stream) = heap_of(&team)?;
        let op = (self.make)(&heap, &stream)?;
        op.refill(1)?;
        team.agree(true)?;
        (op.launch)(&stream)?;
        stream.synchronize()?;
        team.check()?;
        match calm.team(rest, &format!("before{}", self.at))? {
            Some(team) => self.results(&team),
            None => Ok(Vec::new()),
        }
    }

    /// The bits of a launch on a team of the rest, which are right.
    fn results(&self, team: &LiveTeam) -> Result<Vec<Vec<u8>>> {
        let (heap, stream) = heap_of(team)?;
        let op = (self.make)(&heap, &stream)?;
        op.refill(AGAIN)?;
        op.poison()?;
        team.agree(true)?;
        (op.launch)(&stream)?;
        stream.synchronize()?;
        team.check()?;
        assert!(!op.outs.iter().all(all_poison), "{}: nothing ran", op.name);
        expected::check(&op, AGAIN, &heap)?;
        let bits = op.bits()?;
        // Memory of one goes when nobody reads it any more.
        team.agree(true)?;
        Ok(bits)
    }

    /// The victim: some of the launches, then none, until it is killed or may go on.
    fn park(
        &self,
        op: &Op,
        (team, stream): (&LiveTeam, &Stream),
        inside: impl Fn(),
    ) -> Result<Value> {
        if self.launches > 0 {
            let steps = op.steps.as_ref().ok_or_else(|| Error::internal("one launch only"))?;
            (steps.1)(stream, self.launches)?;
        }
        inside();
        let go = self.folder.join(format!("go.{}", self.at));
        if !wait_for(LIFE, || go.exists()) {
            return Err(Error::internal("nobody let the victim go on"));
        }
        stream.synchronize()?;
        let fault = team.check().err().map(|e| e.to_json());
        Ok(json!({ "op": op.name, "victim": true, "fault": fault }))
    }
}

/// Poison, or a count that is 0 or poison.
fn no_result(t: &Tensor) -> bool {
    let counts = t.dtype() == DType::I64;
    t.read(|b| b.iter().all(|&x| x == DType::POISON || counts && x == 0)).unwrap()
}

/// All ranks of a job; they are gone when it is dropped.
struct Job {
    dir: tempfile::TempDir,
    ranks: Vec<Child>,
    what: String,
}

impl Job {
    fn start(num: usize, way: &str, cases: &[(usize, usize)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let secret = Secret::random().unwrap().reveal().to_owned();
        let list: Vec<String> = cases.iter().map(|(i, l)| format!("{i}:{l}")).collect();
        let role = format!("{way}|{}|{}", dir.path().display(), list.join(","));
        let rank = |r: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "processes::role_of_a_process", "--ignored", "--nocapture"])
                .env(ROLE, &role)
                .env("TILEWIRE_RANK", format!("{r}/{num}@127.0.0.1:{port}"))
                .env("TILEWIRE_SECRET", &secret)
                .env("NCCL_NVLS_ENABLE", "0")
                .env("NCCL_GRAPH_REGISTER", "0")
                .env("NVSHMEM_DISABLE_NVLS", "1")
                .env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
                .env("CUBLASMP_DISABLE_MULTICAST", "1")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        Self { ranks: (0..num).map(rank).collect(), dir, what: way.to_owned() }
    }

    fn victim(&self) -> usize {
        self.ranks.len() - 1
    }

    /// Waits for a file of each of the first `num` ranks; a rank that has ended without it fails
    /// the test.
    fn files(&mut self, name: &str, num: usize) -> Vec<String> {
        let path = |dir: &Path, r: usize| dir.join(format!("{name}.{r}"));
        for r in 0..num {
            let (file, child) = (path(self.dir.path(), r), &mut self.ranks[r]);
            let mut ended = None;
            let there = wait_for(Duration::from_secs(45), || {
                // First the state, then the file: a rank may write and end between two looks.
                ended = child.try_wait().unwrap();
                file.exists() || ended.is_some()
            });
            if !there || !file.exists() {
                let texts: Vec<String> = std::fs::read_dir(self.dir.path())
                    .map(|d| {
                        d.flatten()
                            .filter(|e| e.file_name().to_string_lossy().starts_with("report"))
                    })
                    .map(|d| d.filter_map(|e| std::fs::read_to_string(e.path()).ok()).collect())
                    .unwrap_or_default();
                panic!("{}: rank {r} wrote no {name} (ended: {ended:?}): {texts:?}", self.what);
            }
        }
        (0..num).map(|r| std::fs::read_to_string(path(self.dir.path(), r)).unwrap()).collect()
    }

    fn signal(&self, s: Signal) {
        let pid = Pid::from_raw(self.ranks[self.victim()].id() as i32).unwrap();
        kill_process(pid, s).unwrap();
    }

    /// Hits the victim inside case `at`, or lets it end there; what the others report, and when
    /// that was.
    fn hit(&mut self, at: usize, s: Option<Signal>) -> (u64, Vec<Value>) {
        let (victim, num) = (self.victim(), self.ranks.len());
        self.files(&format!("inside.{at}"), num);
        std::thread::sleep(INSIDE);
        let when = now_ms();
        match s {
            Some(s) => self.signal(s),
            None => put(self.dir.path(), &format!("go.{at}"), ""),
        }
        let reports = self.files(&format!("report.{at}"), victim);
        (when, reports.iter().map(|r| serde_json::from_str(r).unwrap()).collect())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for c in &mut self.ranks {
            c.kill().ok();
            c.wait().ok();
        }
    }
}

/// As many ranks as leave a team when one is gone, or as the environment says; they share GPUs
/// where there are fewer. None without a GPU: then the test did not run.
#[track_caller]
fn num_ranks() -> Option<usize> {
    let none = match device_count() {
        Ok(0) => "there is no device".to_owned(),
        Ok(n) => return Some(ranks_asked().unwrap_or((n as usize).clamp(3, 4))),
        Err(e) => {
            assert!(e.is_unavailable() && e.get_hint().is_some(), "{e}");
            e.to_string()
        }
    };
    did_not_run(Lack::Gpu, none);
    None
}

fn check(what: &str, reports: &[Value]) {
    for v in reports {
        println!("{what}: {v}");
        assert!(v["failed"].is_null(), "{what}: {v}");
        for good in ["poisoned", "context_alive", "same_as_before"] {
            assert_eq!(v[good], true, "{what}: {good}: {v}");
        }
        assert_eq!(v["go_on"], reports.len(), "{what}: {v}");
    }
}

fn is(v: &Value, kind: ErrorKind) -> bool {
    v["error"]["kind"] == serde_json::to_value(kind).unwrap()
}

/// Stops the last of `num` ranks inside each case, one after the other: one set of processes for
/// all of them, in which the victim goes on after each. The operations where nobody named it.
fn stop_in_each(num: usize, cases: &[(usize, usize)]) -> Vec<usize> {
    let mut job = Job::start(num, "stop", cases);
    let (victim, mut unnamed) = (job.victim(), Vec::new());
    for (at, (i, _)) in cases.iter().enumerate() {
        let what = format!("operation {i}, stopped");
        let (_, reports) = job.hit(at, Some(Signal::STOP));
        check(&what, &reports);
        // Before that, the log has said whom the wait was for: the victim has made one call less.
        let fewer = format!("rank {victim} has made ");
        let late = |v: &Value| {
            v["late"]
                .as_array()
                .is_some_and(|l| l.iter().any(|t| t.as_str().is_some_and(|t| t.contains(&fewer))))
        };
        assert!(
            reports.iter().any(late),
            "{what}: nobody warned of a wait that lasts: {reports:?}"
        );
        // Who waited longest says so; the others may hear of that before their own time is over.
        let named = |v: &&Value| is(v, ErrorKind::Timeout) && v["error"]["peer"] == victim;
        if !reports.iter().any(|v| named(&v)) {
            unnamed.push(*i);
        }
        for v in &reports {
            assert!(is(v, ErrorKind::Timeout) || is(v, ErrorKind::Aborted), "{what}: {v}");
            let most = (stopped() + how_late()).as_millis() as u64;
            assert!(v["took_ms"].as_u64().unwrap() < most, "{what}: {v}");
        }
        put(job.dir.path(), &format!("go.{at}"), "");
        job.signal(Signal::CONT);
        let all = job.files(&format!("report.{at}"), num);
        let of_victim: Value = serde_json::from_str(&all[victim]).unwrap();
        assert!(
            of_victim["fault"]["kind"].is_string(),
            "{what}: the victim has no error: {of_victim}"
        );
    }
    unnamed
}

#[test]
fn a_stopped_process_is_named_by_every_operation() {
    let Some(num) = num_ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cases: Vec<(usize, usize)> = asked(by_puts()).iter().map(|(i, _)| (*i, 0)).collect();
    let jobs = if emulated() { 1 } else { SIDE_BY_SIDE };
    let unnamed = std::thread::scope(|t| {
        let jobs: Vec<_> = cases
            .chunks(cases.len().div_ceil(jobs))
            .map(|cases| t.spawn(move || stop_in_each(num, cases)))
            .collect();
        jobs.into_iter().flat_map(|j| j.join().unwrap()).collect::<Vec<_>>()
    });
    // Last, so that all operations were seen: who waits for somebody who waits for the victim may
    // name the wrong one.
    assert!(unnamed.is_empty(), "in operations {unnamed:?} nobody names the last rank");
}

/// Each of [`KILLS`] that was asked for, in processes of its own: the others hear of the victim's
/// end within `late`.
fn end_in_each_way_of_waiting(way: &str, s: Option<Signal>, late: Duration) {
    let Some(num) = num_ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted: Vec<usize> = asked(by_puts()).iter().map(|(i, _)| *i).collect();
    let cases: Vec<_> = KILLS.iter().filter(|c| wanted.contains(&c.0)).collect();
    assert!(!cases.is_empty(), "none of {wanted:?} is among those whose rank ends");
    for (i, launches) in cases {
        let what = format!("operation {i}, {way} after {launches} launches");
        let mut job = Job::start(num, way, &[(*i, *launches)]);
        let victim = job.victim();
        let (when, reports) = job.hit(0, s);
        check(&what, &reports);
        for v in &reports {
            assert!(is(v, ErrorKind::PeerDead) && v["error"]["peer"] == victim, "{what}: {v}");
            let at = v["at_ms"].as_u64().unwrap();
            assert!(at < when + late.as_millis() as u64, "{what}: {} ms: {v}", at - when);
        }
    }
}

#[test]
fn a_killed_process_is_named_in_each_way_of_waiting() {
    end_in_each_way_of_waiting("kill", Some(Signal::KILL), how_late());
}

/// It has said goodbye: what it may have sent before is waited for, for a second.
#[test]
fn a_process_that_leaves_is_named_in_each_way_of_waiting() {
    end_in_each_way_of_waiting("leave", None, how_late() + Duration::from_secs(1));
}
