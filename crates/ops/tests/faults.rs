//! The fault matrix on real processes: a rank is killed or stopped inside each operation, in a
//! named phase; the others name it in time, form a new team on new memory, and compute.
//!
//! The parent starts this test binary again, once per rank, in the role of a rank. The victim parks
//! on a test-only gate (a protocol hook), says so with a file, and waits for its fate.

mod table;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use table::*;
use tilewire_boot::{Flags, Secret, detect, join_processes};
use tilewire_core::*;
use tilewire_device::Stream;
use tilewire_symm::*;
use tilewire_testing::free_port;

const RANKS: usize = 3;
const VICTIM: u32 = 1;

/// Set in the environment of a rank: `operation|step kind|folder|timeout in ms`.
const ROLE: &str = "FAULT_ROLE";

fn now_ms() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis())
}

/// What a rank does; not a test of its own.
#[test]
#[ignore = "run by the tests below"]
fn role_of_a_rank() {
    let role = std::env::var(ROLE).unwrap();
    let parts: Vec<&str> = role.split('|').collect();
    let (op, kind, folder) = (parts[0], parts[1], PathBuf::from(parts[2]));
    let timeout = Duration::from_millis(parts[3].parse().unwrap());
    let vars: BTreeMap<String, String> = std::env::vars().collect();
    let place = detect(&Flags::of_process(), &vars).unwrap();
    let config = Config::from_env().unwrap();
    let mesh = join_processes(&place, &config, Deadline::after_s(20.0)).unwrap();
    let world = World::join(mesh, WorldCfg { timeout, ..WorldCfg::default() });
    let report =
        rank(&world, op, kind, &folder).unwrap_or_else(|e| json!({"failed": e.to_string()}));
    std::fs::write(folder.join(format!("rank{}", world.rank().get())), report.to_string()).unwrap();
}

fn step_kind(name: &str) -> StepKind {
    match name {
        "put" => StepKind::Put,
        "get" => StepKind::Get,
        "signal" => StepKind::Signal,
        "flag" => StepKind::Flag,
        "wait" => StepKind::Wait,
        _ => StepKind::Compute,
    }
}

fn rank(world: &World, op: &str, kind: &str, folder: &Path) -> Result<Value> {
    let make = all_ops().find(|(n, _)| *n == op).unwrap().1;
    let (team, heap, stream) = heap_of(world, "first")?;
    let ready = make(&heap, &stream, true)?;
    fill(&ready, 1)?;
    let victim = world.rank().get() == VICTIM;
    // It falls when the others are through with the first `prepare`, whose end is told by messages.
    std::fs::write(folder.join(format!("ready{}", world.rank().get())), "").ok();
    let start = Instant::now();
    while victim && !(0..RANKS).all(|r| folder.join(format!("ready{r}")).exists()) {
        assert!(start.elapsed() < Duration::from_secs(20), "the others are not ready");
        std::thread::sleep(Duration::from_millis(1));
    }
    if victim && kind != "prepare" {
        let (kind, gate) = (step_kind(kind), folder.to_owned());
        team.set_hook(move |p| {
            // Both lanes of the operation stop at such a step.
            if p.kind == kind && !gate.join("go").exists() {
                std::fs::write(gate.join("parked"), format!("{} {}", p.op, p.phase)).ok();
                // Until killed, or stopped and continued.
                while !gate.join("go").exists() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            HookAction::Proceed
        });
    }
    if victim && kind == "prepare" {
        std::fs::write(folder.join("parked"), "prepare agree").ok();
        std::thread::sleep(Duration::from_secs(60));
    }
    let done = if kind == "prepare" {
        make(&heap, &stream, true).map(|_| ())
    } else {
        (ready.launch)(&stream).and_then(|()| finish(&stream, &team))
    };
    let at = now_ms();
    if victim {
        // It was only stopped: a late writer of the old generation.
        return Ok(json!({"late": done.err().map(|e| e.to_json())}));
    }
    let Err(error) = done else {
        let place = (world.rank().idx(), world.size());
        return Ok(json!({"ok": true, "differs": expected::differs(op, &ready, place)?}));
    };
    // Where a round is several launches, those that were complete before the fault keep their
    // results.
    let several = op.starts_with("cp_attention") || op.starts_with("ep");
    let values = ready.out.to_f32()?;
    let poisoned = kind == "prepare"
        || if several {
            values.iter().any(|v| v.is_nan())
        } else {
            values.iter().all(|v| v.is_nan())
        };
    let rest: Vec<Rank> = Rank::all(world.size()).filter(|r| r.get() != VICTIM).collect();
    let (team, heap, stream) = reform(world, &rest)?;
    // Filled before the late writer goes on, looked at after.
    let watch = heap.alloc(1 << 12, "watch")?;
    let ctx = OpCtx::new(&heap, "watch", 0);
    // SAFETY: no operation uses the buffer.
    unsafe { ctx.write_local(watch.range(0, 1 << 12), &[0x5A; 1 << 12]) };
    team.agree(true)?;
    std::fs::write(folder.join("go"), "").ok();
    let again = make(&heap, &stream, true)?;
    fill(&again, 2)?;
    (again.launch)(&stream)?;
    finish(&stream, &team)?;
    let differs = expected::differs(op, &again, (team.rank().idx(), team.size()))?;
    std::thread::sleep(Duration::from_millis(100));
    let mut bytes = [0; 1 << 12];
    // SAFETY: as above.
    unsafe { ctx.read_local(watch.range(0, 1 << 12), &mut bytes) };
    team.agree(true)?;
    Ok(json!({
        "error": error.to_json(),
        "at_ms": at.to_string(),
        "poisoned": poisoned,
        "computed": differs.is_none(),
        "differs": differs,
        "untouched": bytes.iter().all(|&b| b == 0x5A),
    }))
}

fn reform(world: &World, rest: &[Rank]) -> Result<(LiveTeam, Heap, Stream)> {
    let team = world.team(rest, "rest")?.ok_or_else(|| Error::internal("not in the rest"))?;
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 17))?;
    Ok((team, heap, Stream::new("rest")?))
}

struct Job {
    dir: tempfile::TempDir,
    ranks: Vec<Child>,
}

impl Job {
    fn start(op: &str, kind: &str, timeout: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let secret = Secret::random().unwrap().reveal().to_owned();
        let ranks = (0..RANKS)
            .map(|r| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "role_of_a_rank", "--ignored", "--nocapture"])
                    .env(
                        ROLE,
                        format!("{op}|{kind}|{}|{}", dir.path().display(), timeout.as_millis()),
                    )
                    .env("TILEWIRE_RANK", format!("{r}/{RANKS}@127.0.0.1:{port}"))
                    .env("TILEWIRE_SECRET", &secret)
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        Self { dir, ranks }
    }

    fn wait_parked(&mut self) -> String {
        let start = Instant::now();
        let file = self.dir.path().join("parked");
        while start.elapsed() < Duration::from_secs(20) {
            if let Ok(text) = std::fs::read_to_string(&file)
                && !text.is_empty()
            {
                return text;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let reports: Vec<_> = std::fs::read_dir(self.dir.path())
            .map(|d| d.flatten().filter_map(|e| std::fs::read_to_string(e.path()).ok()).collect())
            .unwrap_or_default();
        panic!("the victim never parked: {reports:?} {}", self.stderr());
    }

    fn stderr(&mut self) -> String {
        let mut all = String::new();
        for c in &mut self.ranks {
            c.kill().ok();
            if let Some(e) = &mut c.stderr {
                e.read_to_string(&mut all).ok();
            }
        }
        all
    }

    fn signal(&self, s: Signal) {
        let pid = Pid::from_raw(self.ranks[VICTIM as usize].id() as i32).unwrap();
        kill_process(pid, s).unwrap();
    }

    /// Reports of all ranks but the victim.
    fn reports(&mut self, what: &str) -> Vec<(usize, Value)> {
        let start = Instant::now();
        let survivors = (0..RANKS).filter(|&r| r != VICTIM as usize);
        survivors
            .map(|r| {
                while self.ranks[r].try_wait().unwrap().is_none() {
                    if start.elapsed() > Duration::from_secs(30) {
                        panic!("{what}: rank {r} hangs: {}", self.stderr());
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                let text = std::fs::read_to_string(self.dir.path().join(format!("rank{r}")));
                let text = text.unwrap_or_else(|_| panic!("{what}: rank {r} left no report"));
                (r, serde_json::from_str(&text).unwrap())
            })
            .collect()
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

/// Steps at which an operation is hit. `get` exists in one strategy only.
fn kinds(op: &str) -> &'static [&'static str] {
    match op {
        "cp_attention get" => &["get", "signal", "wait"],
        "ep" | "ep fine" => &["put", "signal", "flag", "wait"],
        _ => &["put", "signal", "wait"],
    }
}

/// Operations that three ranks can run.
fn ops() -> impl Iterator<Item = &'static str> {
    all_ops().map(|(n, _)| n).filter(|n| !n.ends_with("hybrid"))
}

fn check_survivor(what: &str, r: usize, v: &Value, kind: &str) {
    let e = &v["error"];
    assert_eq!(e["kind"], kind, "{what}: rank {r}: {v}");
    assert_eq!(e["peer"], VICTIM, "{what}: rank {r}: {v}");
    assert!(e["op"].is_string() && e["phase"].is_string(), "{what}: rank {r}: {v}");
    for good in ["poisoned", "computed", "untouched"] {
        assert_eq!(v[good], true, "{what}: rank {r} {good}: {v}");
    }
}

#[test]
fn a_killed_rank_is_named_within_a_second_wherever_it_stood() {
    for op in ops() {
        for kind in kinds(op).iter().chain(&["prepare"]) {
            let what = format!("{op} at {kind}");
            let mut job = Job::start(op, kind, Duration::from_secs(600));
            job.wait_parked();
            let killed = now_ms();
            job.signal(Signal::KILL);
            for (r, v) in job.reports(&what) {
                check_survivor(&what, r, &v, "peer_dead");
                let at: u128 = v["at_ms"].as_str().unwrap().parse().unwrap();
                assert!(at < killed + 1000, "{what}: rank {r} took {} ms", at - killed);
                if *kind != "prepare" {
                    let named = v["error"]["op"].as_str().unwrap();
                    let family = op.split(' ').next().unwrap();
                    assert!(named.starts_with(family), "{what}: {named}");
                }
            }
        }
    }
}

#[test]
fn a_stopped_rank_goes_on_and_the_result_is_right() {
    // All at once: each waits as long as its rank is stopped.
    let stopped = |op: &str| {
        let mut job = Job::start(op, "signal", Duration::from_secs(60));
        job.wait_parked();
        job.signal(Signal::STOP);
        std::fs::write(job.dir.path().join("go"), "").unwrap();
        std::thread::sleep(Duration::from_secs(10));
        job.signal(Signal::CONT);
        for (r, v) in job.reports(op) {
            assert!(v["ok"] == true && v["differs"].is_null(), "{op}: rank {r}: {v}");
        }
    };
    let start = Instant::now();
    std::thread::scope(|s| {
        for op in ["ag_gemm", "gemm_rs fused", "all_reduce", "ep", "cp_attention ring"] {
            s.spawn(move || stopped(op));
        }
    });
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

/// A rank that is stopped beyond the deadline is given up, and writes into its old memory when it
/// goes on: the new team's memory is not touched.
#[test]
fn a_late_writer_of_an_old_generation_touches_nothing() {
    for op in ["ag_gemm", "gemm_rs fused", "all_gather", "ep", "cp_attention all_gather"] {
        let mut job = Job::start(op, "put", Duration::from_millis(700));
        job.wait_parked();
        let reports = job.reports(op);
        for (r, v) in reports {
            // One rank times out; the other may hear of it first.
            let kind = v["error"]["kind"].as_str().unwrap_or_default().to_owned();
            assert!(kind == "timeout" || kind == "aborted", "{op}: rank {r}: {v}");
            for good in ["poisoned", "computed", "untouched"] {
                assert_eq!(v[good], true, "{op}: rank {r} {good}: {v}");
            }
        }
        // The victim went on (the survivors let it) and ended by itself.
        let start = Instant::now();
        let victim = &mut job.ranks[VICTIM as usize];
        while victim.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(20), "{op}: the victim hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn killed_jobs_leave_nothing_behind() {
    let leftovers = || -> usize {
        ["/dev/shm", "/tmp"]
            .iter()
            .filter_map(|d| std::fs::read_dir(d).ok())
            .flat_map(|d| d.filter_map(|e| e.ok()?.file_name().into_string().ok()))
            .filter(|n| n.contains("tilewire"))
            .count()
    };
    let before = leftovers();
    for _ in 0..3 {
        let mut job = Job::start("all_reduce", "signal", Duration::from_secs(600));
        job.wait_parked();
        job.ranks.iter_mut().for_each(|c| drop(c.kill()));
    }
    assert_eq!(leftovers(), before);
}
