//! Every flag that is there or not: run both ways, with what it changes. The list of flags is that of
//! the parser, so that a new one fails here until it has a row.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use clap::{ArgAction, CommandFactory};
use serde_json::Value;
use tilewire::device::jit::Cache;
use tilewire::prelude::*;
use tilewire_cli::args::Cli;

/// What a run left behind.
#[derive(Debug)]
struct Seen {
    code: Option<i32>,
    out: String,
    err: String,
    /// The file that `--metrics m` names.
    metrics: String,
    /// Entries of the kernel cache.
    cached: usize,
}

impl Seen {
    fn lines(&self) -> Vec<&str> {
        self.out.lines().collect()
    }

    /// Every line of standard output as JSON; none if one is something else.
    fn json(&self) -> Option<Vec<Value>> {
        self.out.lines().map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// The first step.
    fn step(&self, field: &str) -> Value {
        let line = self.metrics.lines().next().expect("a step");
        serde_json::from_str::<Value>(line).expect("JSON")[field].clone()
    }
}

/// A flag, the rest of the command line, the exit code with and without it, and whether the two
/// runs, without and with it, differ as they should.
struct Row {
    command: &'static str,
    flag: &'static str,
    rest: &'static [&'static str],
    code: i32,
    shows: fn(&Seen, &Seen) -> bool,
}

const fn row(
    command: &'static str,
    flag: &'static str,
    rest: &'static [&'static str],
    code: i32,
    shows: fn(&Seen, &Seen) -> bool,
) -> Row {
    Row { command, flag, rest, code, shows }
}

const VERIFY: &[&str] = &["--op", "all_gather", "--dtype", "f32", "--ranks", "1"];
/// Nothing is allowed to be off: rounding is wrong, and moving is not.
const STRICT: &[&str] =
    &["--op", "all_gather,ag_gemm", "--dtype", "bf16", "--ranks", "2", "--atol", "0"];
const BENCH: &[&str] =
    &["--op", "all_gather", "--m", "8", "--n", "8", "--k", "8", "--iters", "1", "--warmup", "0"];
const TRAIN: &[&str] = &[
    "--task",
    "copy",
    "--ranks",
    "2",
    "--steps",
    "1",
    "--seq",
    "16",
    "--batch",
    "4",
    "--d-model",
    "16",
    "--head-dim",
    "8",
    "--d-ff",
    "16",
    "--metrics",
    "m",
];
const NO_FILE: &[&str] = &["--task", "copy", "--ranks", "2", "--resume", "nowhere"];

const ROWS: &[Row] = &[
    row("run", "--no-prefix", &["-n", "2", "--", "sh", "-c", "echo hello"], 0, |off, on| {
        let mut lines = off.lines();
        lines.sort_unstable();
        lines == ["[r0] hello", "[r1] hello"] && on.lines() == ["hello"; 2]
    }),
    row("verify", "--json", VERIFY, 0, |off, on| {
        let rows = on.json().unwrap_or_default();
        off.out.contains("cases right") && !rows.is_empty() && rows.iter().all(|r| r["wrong"] == 0)
    }),
    row("verify", "--quiet", VERIFY, 0, |off, on| {
        off.out.starts_with("ok ") && on.lines().len() == 1 && on.out.contains("cases right")
    }),
    row("verify", "--quiet", STRICT, 1, |off, on| {
        let wrong = |s: &Seen| s.lines().iter().filter(|l| l.starts_with("WRONG")).count();
        off.out.contains("ok ") && !on.out.contains("ok ") && wrong(on) == wrong(off)
    }),
    row(
        "verify",
        "--quiet",
        &["--json", "--op", "all_gather,ag_gemm", "--dtype", "bf16", "--ranks", "2", "--atol", "0"],
        1,
        |off, on| {
            let (all, wrong) = (off.json().unwrap_or_default(), on.json().unwrap_or_default());
            !wrong.is_empty() && wrong.len() < all.len() && wrong.iter().all(|r| r["wrong"] != 0)
        },
    ),
    row("bench", "--json", BENCH, 0, |off, on| {
        off.out.starts_with("# host") && on.json().is_some_and(|rows| rows.len() == 1)
    }),
    row("bench", "--csv", BENCH, 0, |off, on| {
        off.out.starts_with("# host") && on.out.starts_with("op,dtype,ranks")
    }),
    row("bench", "--md", BENCH, 0, |off, on| {
        off.out.starts_with("# host") && on.out.starts_with("| op | dtype")
    }),
    // Threads and processes compute the same ...
    row("train", "--processes", TRAIN, 0, |off, on| off.step("loss") == on.step("loss")),
    // ... and only a process can be the first to fail.
    row("train", "--processes", NO_FILE, 2, |off, on| {
        let first = |s: &Seen| s.err.contains("failed first");
        !first(off) && first(on)
    }),
    // Queued or replayed, a step has the same bits.
    row("train", "--no-graph", TRAIN, 0, |off, on| off.step("loss") == on.step("loss")),
    row("train", "--calibrate", TRAIN, 0, |off, on| {
        off.step("hidden").is_null() && on.step("hidden").as_f64().is_some_and(|h| h <= 1.0)
    }),
    row("train", "--no-attention", TRAIN, 0, |off, on| off.step("loss") != on.step("loss")),
    row("train", "--no-experts", TRAIN, 0, |off, on| off.step("loss") != on.step("loss")),
    row("dump", "--json", &["recorders"], 0, |off, on| {
        let teams = on.json().unwrap_or_default();
        off.out.contains("all ranks made the same calls")
            && teams.len() == 1
            && teams[0]["first_divergence"].is_null()
    }),
    row("kernels list", "--json", &[], 0, |off, on| {
        off.out.contains("comm/signal.cu")
            && on.json().is_some_and(|r| r.len() == off.lines().len())
    }),
    row("kernels cache", "--json", &[], 0, |off, on| {
        off.out.starts_with("1 kernels") && on.json().is_some_and(|r| r[0]["entries"] == 1)
    }),
    row("kernels cache", "--clear", &[], 0, |off, on| {
        off.out.starts_with("1 kernels") && on.out.contains("removed") && on.cached == 0
    }),
    // Without two GPUs, an error that says what to do.
    row("bench links", "--json", &["--ranks", "1"], 2, |off, on| {
        let told = |s: &Seen| s.err.contains("hint") && s.out.is_empty();
        told(off) && told(on)
    }),
    row("doctor", "--json", &["--shm", "nowhere"], 0, |off, on| {
        let findings: Option<Vec<Value>> = serde_json::from_str(&on.out).ok();
        off.out.starts_with("ok ")
            && findings.is_some_and(|f| f.iter().any(|f| f["code"] == "host"))
    }),
];

/// Long names of the flags without a value, with their commands.
fn flags(path: &str, command: &clap::Command, out: &mut BTreeSet<(String, String)>) {
    for a in command.get_arguments() {
        if matches!(a.get_action(), ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count) {
            let name = a.get_long().expect("every flag has a long name");
            out.insert((path.to_owned(), format!("--{name}")));
        }
    }
    for c in command.get_subcommands() {
        flags(format!("{path} {}", c.get_name()).trim(), c, out);
    }
}

fn run(row: &Row, flag: &[&str]) -> Seen {
    let dir = tempfile::tempdir().unwrap();
    if row.command == "dump" {
        recorders(&dir.path().join("recorders"));
    }
    let cache = row.command.starts_with("kernels").then(|| one_kernel(dir.path()));
    let o = Command::new(env!("CARGO_BIN_EXE_tilewire"))
        .env("TILEWIRE_CACHE_DIR", dir.path())
        .args(row.command.split(' '))
        .args([flag, row.rest].concat())
        .current_dir(dir.path())
        .output()
        .expect("the binary starts");
    Seen {
        code: o.status.code(),
        out: String::from_utf8(o.stdout).unwrap(),
        err: String::from_utf8(o.stderr).unwrap(),
        metrics: std::fs::read_to_string(dir.path().join("m")).unwrap_or_default(),
        cached: cache.map_or(0, |c| c.usage().unwrap().entries),
    }
}

/// A cache with an entry.
fn one_kernel(folder: &Path) -> Cache {
    let spec = tilewire::symm::kernel_specs("sm_90a").remove(0);
    let cache = Cache::open(Some(folder)).unwrap();
    cache.store(&spec.key(), "nvrtc13.0", b"code").unwrap();
    cache
}

/// Flight recorders of two ranks that made the same call.
fn recorders(folder: &Path) {
    World::run_threads(2, WorldCfg::for_tests(), |w| {
        let team = w.everyone("t")?;
        team.launch_begin(&tilewire::symm::Fingerprint::new("gemm", "m=1"))?;
        tilewire_cli::dump::write(folder, &[&team])?;
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

#[test]
fn every_flag_has_a_row() {
    let mut known = BTreeSet::new();
    flags("", &Cli::command(), &mut known);
    let mut rows: BTreeSet<_> =
        ROWS.iter().map(|r| (r.command.to_owned(), r.flag.to_owned())).collect();
    // Needs the compiler: the test stage `kernels` runs it both ways.
    rows.insert(("kernels compile".to_owned(), "--json".to_owned()));
    // Needs GPUs: tests/gpus.rs runs it where they are, and looks at the error where they are not.
    rows.insert(("topo".to_owned(), "--json".to_owned()));
    // Needs GPUs: `run.sh bench` runs it there, and the test below on the host.
    rows.insert(("bench".to_owned(), "--zero-copy".to_owned()));
    assert_eq!(known, rows, "left: flags of the parser, right: flags that are run");
}

#[test]
fn zero_copy_is_for_gpus() {
    let row = row("bench", "--zero-copy", BENCH, 2, |_, _| true);
    let seen = run(&row, &[row.flag]);
    assert_eq!(seen.code, Some(2), "{seen:#?}");
    assert!(seen.err.contains("--backend vmm") && seen.out.is_empty(), "{seen:#?}");
}

#[test]
fn every_flag_works_both_ways() {
    for r in ROWS {
        let (off, on) = (run(r, &[]), run(r, &[r.flag]));
        let what = format!("{} {}: without {off:#?}, with {on:#?}", r.command, r.flag);
        assert_eq!((off.code, on.code), (Some(r.code), Some(r.code)), "{what}");
        assert!((r.shows)(&off, &on), "{what}");
    }
}
