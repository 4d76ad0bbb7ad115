//! Every flag that is there or not, and every one of `bench` that takes a value: run both ways,
//! with what it changes. The list of flags is that of the parser, so that a new one fails here
//! until it has a row.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

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
    seconds: f64,
}

impl Seen {
    /// A field of the first row.
    fn field(&self, name: &str) -> Value {
        self.json().and_then(|rows| Some(rows.first()?[name].clone())).unwrap_or_default()
    }

    fn shape_has(&self, word: &str) -> bool {
        self.field("shape").as_str().is_some_and(|s| s.split(' ').any(|w| w == word))
    }

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

const SHARED: &[&str] = &[
    "--rounds",
    "1",
    "--ranks",
    "2",
    "--op",
    "all_reduce",
    "--",
    "--m",
    "32",
    "--n",
    "64",
    "--iters",
    "3",
];
const VERIFY: &[&str] = &["--op", "all_gather", "--dtype", "f32", "--ranks", "1"];
/// Nothing is allowed to be off: rounding is wrong, and moving is not.
const STRICT: &[&str] =
    &["--op", "all_gather,ag_gemm", "--dtype", "bf16", "--ranks", "2", "--atol", "0"];
const BENCH: &[&str] =
    &["--op", "all_gather", "--m", "8", "--n", "8", "--iters", "1", "--warmup", "0"];
/// Everything, of sizes that a collective has, too.
const ALL: &[&str] = &["--json", "--m", "24", "--n", "8", "--iters", "1", "--warmup", "0"];
const EP: &[&str] = &["--json", "--op", "ep_dispatch", "--iters", "1", "--warmup", "0"];
/// The same without the sizes; one operation that multiplies.
const TIMED: &[&str] = &["--json", "--op", "ag_gemm"];
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
    row("checkpoint list", "--json", &["c"], 0, |off, on| {
        off.out.contains("step 1, ") && on.json().is_some_and(|r| r.len() == 1 && r[0]["step"] == 1)
    }),
    row("checkpoint verify", "--json", &["c"], 0, |off, on| {
        let whole = |r: &Value| r["damage"].as_array().is_some_and(Vec::is_empty);
        off.out.contains(": whole, ") && on.json().is_some_and(|r| r.iter().all(whole))
    }),
    row("plan cp_attention", "--json", &["--docs", "300,84", "--ranks", "2"], 0, |off, on| {
        let rows = on.json().unwrap_or_default();
        off.out.contains("most work 1.0") && rows.len() == 2 && rows[1]["rows"] == 192
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
    row("bench shared", "--json", SHARED, 0, |off, on| {
        off.json().is_none() && on.json().is_some_and(|r| r.len() == 1 && r[0]["ranks"] == 2)
    }),
    row("doctor", "--json", &["--shm", "nowhere"], 0, |off, on| {
        let findings: Option<Vec<Value>> = serde_json::from_str(&on.out).ok();
        off.out.starts_with("ok ")
            && findings.is_some_and(|f| f.iter().any(|f| f["code"] == "host"))
    }),
];

/// A flag with a value, the rest of the command line of `bench`, the exit code with it, and whether
/// the two runs, without and with it, differ as they should.
struct Valued {
    flag: &'static [&'static str],
    rest: &'static [&'static str],
    code: i32,
    shows: fn(&Seen, &Seen) -> bool,
}

const fn valued(
    flag: &'static [&'static str],
    rest: &'static [&'static str],
    code: i32,
    shows: fn(&Seen, &Seen) -> bool,
) -> Valued {
    Valued { flag, rest, code, shows }
}

/// What is for GPUs is refused on the host, with where it has an effect; with that, `run.sh bench`
/// runs it.
fn refused(off: &Seen, on: &Seen) -> bool {
    let told = ["has no effect on", "hint", "`--backend vmm`"].iter().all(|w| on.err.contains(w));
    off.code == Some(0) && told && on.out.is_empty()
}

const VALUES: &[Valued] = &[
    // The others need GPUs: one that there is not lists those that there are.
    valued(&["--backend", "none"], TIMED, 2, |off, on| {
        off.field("backend") == "host" && on.err.contains("nvshmem")
    }),
    valued(&["--op", "all_gather"], ALL, 0, |off, on| {
        off.lines().len() == 55 && on.lines().len() == 1 && on.field("op") == "all_gather"
    }),
    valued(&["--ranks", "3"], TIMED, 0, |off, on| {
        off.field("ranks") == 2 && on.field("ranks") == 3
    }),
    valued(&["--dtype", "bf16"], TIMED, 0, |off, on| {
        off.field("dtype") == "f32" && on.field("dtype") == "bf16"
    }),
    valued(&["--m", "24"], TIMED, 0, |off, on| off.shape_has("m=512") && on.shape_has("m=24")),
    valued(&["--n", "24"], TIMED, 0, |off, on| off.shape_has("n=256") && on.shape_has("n=24")),
    valued(&["--k", "24"], TIMED, 0, |off, on| off.shape_has("k=256") && on.shape_has("k=24")),
    valued(&["--k", "24"], BENCH, 2, |off, on| {
        off.code == Some(0) && on.err.contains("has no effect on all_gather")
    }),
    // No peer is so fast.
    valued(&["--timeout-s", "0.000000001"], TIMED, 2, |off, on| {
        off.code == Some(0) && on.out.is_empty() && on.err.contains("error: ")
    }),
    valued(&["--iters", "0"], TIMED, 2, |off, on| {
        off.code == Some(0) && on.err.contains("positive")
    }),
    // Nothing says how often it ran but the clock.
    valued(
        &["--warmup", "20000"],
        &["--op", "all_gather", "--m", "8", "--n", "8"],
        0,
        |off, on| on.seconds > 2.0 * off.seconds,
    ),
    valued(&["--compare", "nowhere"], TIMED, 2, |off, on| {
        off.code == Some(0) && on.err.contains("nowhere")
    }),
    // Both ways with --compare: tests/bench.rs.
    valued(&["--threshold", "1"], TIMED, 2, |_, on| on.err.contains("--compare")),
    valued(&["--bytes", "1024"], BENCH, 2, refused),
    valued(&["--sms", "16"], BENCH, 2, refused),
    valued(&["--documents", "2"], BENCH, 2, refused),
    valued(&["--tokens", "128"], BENCH, 2, refused),
    valued(&["--hidden", "128"], BENCH, 2, refused),
    valued(&["--experts", "8"], BENCH, 2, refused),
    valued(&["--top-k", "2"], BENCH, 2, refused),
    valued(&["--align", "1"], BENCH, 2, refused),
    valued(&["--tokens", "8"], EP, 0, |off, on| {
        off.shape_has("tokens=256") && on.shape_has("tokens=8")
    }),
    valued(&["--hidden", "24"], EP, 0, |off, on| {
        off.shape_has("hidden=512") && on.shape_has("hidden=24")
    }),
    valued(&["--experts", "6"], EP, 0, |off, on| {
        off.shape_has("experts=16") && on.shape_has("experts=6")
    }),
    valued(&["--top-k", "2"], EP, 0, |off, on| off.shape_has("top_k=4") && on.shape_has("top_k=2")),
    valued(&["--align", "2"], EP, 0, |off, on| off.shape_has("align=8") && on.shape_has("align=2")),
    valued(&["--layout", "rank-major"], EP, 0, |off, on| {
        !off.shape_has("rank_major") && on.shape_has("rank_major")
    }),
    // Its default, but given.
    valued(&["--layout", "expert-major"], BENCH, 2, refused),
];

/// Long names of the flags without a value, with their commands.
fn flags(path: &str, command: &clap::Command, out: &mut BTreeSet<(String, String)>) {
    for a in command.get_arguments() {
        if is_switch(a) {
            let name = a.get_long().expect("every flag has a long name");
            out.insert((path.to_owned(), format!("--{name}")));
        }
    }
    for c in command.get_subcommands() {
        flags(format!("{path} {}", c.get_name()).trim(), c, out);
    }
}

fn is_switch(a: &clap::Arg) -> bool {
    matches!(a.get_action(), ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count)
}

fn run(row: &Row, flag: &[&str]) -> Seen {
    let start = Instant::now();
    let dir = tempfile::tempdir().unwrap();
    if row.command == "dump" {
        recorders(&dir.path().join("recorders"));
    }
    if row.command.starts_with("checkpoint") {
        let mut train = Command::new(env!("CARGO_BIN_EXE_tilewire"));
        train.arg("train").args(TRAIN).args(["--checkpoint", "c"]).current_dir(dir.path());
        assert!(train.output().expect("the binary starts").status.success());
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
        seconds: start.elapsed().as_secs_f64(),
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
    let (off, on) = (run(&row, &[]), run(&row, &[row.flag]));
    assert!(on.code == Some(2) && refused(&off, &on), "{on:#?}");
}

#[test]
fn every_value_of_bench_has_an_effect_or_is_refused() {
    let cli = Cli::command();
    let bench = cli.find_subcommand("bench").unwrap();
    let known = bench.get_arguments().filter(|a| !is_switch(a)).filter_map(|a| a.get_long());
    let known: BTreeSet<_> = known.map(|name| format!("--{name}")).collect();
    let rows: BTreeSet<_> = VALUES.iter().map(|v| v.flag[0].to_owned()).collect();
    assert_eq!(known, rows, "left: flags of the parser, right: flags that are run");
    for v in VALUES {
        let row = row("bench", v.flag[0], v.rest, 0, |_, _| true);
        let (off, on) = (run(&row, &[]), run(&row, v.flag));
        let what = format!("{:?}: without {off:#?}, with {on:#?}", v.flag);
        assert_eq!((off.code, on.code), (Some(0), Some(v.code)), "{what}");
        assert!((v.shows)(&off, &on), "{what}");
    }
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
