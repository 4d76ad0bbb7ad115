//! `cargo xtask test`: the stages, their times, and the closing line.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::drill::DrillArgs;
use crate::outcome::{NOT_INSTALLED, Outcome};
use crate::suites::{self, Extent};

struct Stage {
    name: &'static str,
    run: fn(&Path, Extent) -> Outcome,
    /// True if `--fast` runs it.
    fast: bool,
}

const fn stage(name: &'static str, run: fn(&Path, Extent) -> Outcome) -> Stage {
    Stage { name, run, fast: false }
}

const fn fast(name: &'static str, run: fn(&Path, Extent) -> Outcome) -> Stage {
    Stage { name, run, fast: true }
}

static STAGES: [Stage; 17] = [
    fast("tidy", |root, _| from_problems(&crate::tidy::check(root))),
    fast("acceptance", |root, _| from_problems(&crate::acceptance::check(root))),
    stage("build", |root, _| build(root)),
    stage("api", |root, _| api(root)),
    fast("spelling", |root, _| spelling(root)),
    stage("dependencies", crate::dependencies::run),
    stage("kernels", crate::kernels::run),
    fast("unit", suites::run_all),
    stage("libraries", |root, _| crate::libraries::run(root)),
    stage("doc", |root, _| suites::run_docs(root)),
    stage("examples", |root, _| examples(root)),
    stage("verify", |root, _| verify(root)),
    stage("train", |root, _| train(root)),
    stage("launchers", |root, _| launchers(root)),
    stage("drill", |root, _| drill(root)),
    stage("torchrun", |root, _| torchrun(root)),
    stage("python", |root, _| crate::python::run(root)),
];

/// The stages whose name contains `only`, if it is given.
///
/// # Errors
/// Where there is none: what did not run has not passed.
fn wanted(only: Option<&str>, extent: Extent) -> Result<Vec<&'static Stage>, String> {
    let among = STAGES.iter().filter(|s| s.fast || extent != Extent::Fast);
    let list: Vec<_> = among.filter(|s| only.is_none_or(|o| s.name.contains(o))).collect();
    if list.is_empty() {
        let names = STAGES.each_ref().map(|s| s.name).join(", ");
        return Err(format!(
            "--only {}: no stage has that in its name: {names}",
            only.unwrap_or("")
        ));
    }
    Ok(list)
}

/// Runs the stages; the last line is what CI reads.
pub fn run(root: &Path, only: Option<&str>, list: bool, extent: Extent) -> ExitCode {
    let stages = match wanted(only, extent) {
        Ok(stages) => stages,
        Err(why) => {
            println!("{why}\n0 passed, 1 failed, 0 skipped");
            return ExitCode::from(2);
        }
    };
    let mut total = Outcome::default();
    let all = only.is_none() && !list && extent != Extent::Fast;
    if all {
        // The network is slow and the first stages compile: the wheels come meanwhile.
        let root = root.to_owned();
        std::thread::spawn(move || crate::python::fetch_ahead(&root));
    }
    for s in stages {
        if list {
            println!("{}", s.name);
            continue;
        }
        println!("==> {}", s.name);
        if all && s.name == "dependencies" {
            // For minutes of it one crate is compiled, by one thread: other stages, which compute
            // as well, have the other processors. Not before `api`, which needs the same folder.
            let root = root.to_owned();
            std::thread::spawn(move || suites::build_ahead(&root));
        }
        let start = Instant::now();
        let mut o = (s.run)(root, extent);
        let over = o.skipped.too_many();
        o.add(&failed(&over));
        if o.failed > 0 && o.failures.is_empty() {
            o.explain("see above", "");
        }
        println!(
            "<== {}: {} passed, {} failed, {} skipped, {:.1} s, {:.1} MB fetched (size on disk)",
            s.name,
            o.passed,
            o.failed,
            o.skipped.total(),
            start.elapsed().as_secs_f64(),
            o.downloaded as f64 / 1e6
        );
        o.failures.iter_mut().for_each(|f| f.insert_str(0, &format!("failed: {}: ", s.name)));
        total.add(&o);
    }
    if list {
        return ExitCode::SUCCESS;
    }
    total.failures.iter().for_each(|f| println!("{f}"));
    if total.skipped.total() > 0 {
        println!("skipped: {}", total.skipped.text());
    }
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped.total());
    ExitCode::from(u8::from(total.failed > 0))
}

pub fn from_problems(problems: &[String]) -> Outcome {
    let mut o = failed(problems);
    o.passed = usize::from(problems.is_empty());
    o
}

/// Prints problems; each is a failure.
fn failed(problems: &[String]) -> Outcome {
    let mut o = Outcome { failed: problems.len(), ..Outcome::default() };
    for p in problems {
        println!("{p}");
        o.explain(p, "");
    }
    o
}

/// Runs a command with the multicast-off variables, inheriting output. Ends it after `limit`.
pub fn exec(root: &Path, program: &str, args: &[&str], limit: Duration) -> bool {
    println!("$ {program} {}", args.join(" "));
    let child =
        Command::new(program).args(args).current_dir(root).envs(OFF).stdin(Stdio::null()).spawn();
    let Ok(mut child) = child.map_err(|e| println!("cannot start {program}: {e}")) else {
        return false;
    };
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if start.elapsed() > limit => {
                println!("{program}: ended after {limit:?}");
                child.kill().ok();
                child.wait().ok();
                return false;
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(50)),
            Err(e) => {
                println!("{program}: {e}");
                return false;
            }
        }
    }
}

/// NVLink multicast stays off in everything that is started from here, and NCCL registers no memory
/// of captured calls, else it is not opened.
pub const OFF: [(&str, &str); 5] = [
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_GRAPH_REGISTER", "0"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("CUBLASMP_DISABLE_MULTICAST", "1"),
];

pub fn one(ok: bool) -> Outcome {
    Outcome { passed: usize::from(ok), failed: usize::from(!ok), ..Outcome::default() }
}

/// As [`one`], of a check that has a name.
pub fn named(what: &str, ok: bool) -> Outcome {
    let mut o = one(ok);
    if !ok {
        o.explain(what, "");
    }
    o
}

pub fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// The command and the examples. Beside the library of Python, with whose features stage `python`
/// builds: else it would build nearly all of this again. Not in one build, where tests of the
/// command would add theirs.
fn build(root: &Path) -> Outcome {
    let python = ["--package", "tilewire-python", "--lib"];
    let mut examples = vec!["--package", "tilewire"];
    EXAMPLES.iter().for_each(|name| examples.extend(["--example", name]));
    let mut o = Outcome::default();
    let candle = CANDLE_BUILD.split(' ').collect();
    let release = |what: &[&'static str]| [&["build", "--release"][..], what, &python].concat();
    for args in [release(&["--package", "tilewire-cli", "--bins"]), release(&examples), candle] {
        o.add(&one(exec(root, &cargo(), &args, Duration::from_secs(1800))));
    }
    o
}

/// Half a minute of the same cases each time, and half a minute of new ones.
fn drill(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    for seed in [Some(1), None] {
        let args = DrillArgs { seconds: 30, seed, ..DrillArgs::default() };
        let tally = crate::drill::run(root, &args);
        let problems = tally.problems();
        o.passed += tally.right;
        o.add(&failed(&problems));
    }
    o
}

const EXAMPLES: [&str; 3] = ["ag_gemm", "expert_layer", "survive"];

/// The example of candle's tensors.
const CANDLE: &str = "grouped_gemm";

/// Its build, which is one alone: candle wants features of crates that all others use, and with
/// them everything is built anew. Not optimised, that takes a third of the processor time.
const CANDLE_BUILD: &str = "build --package tilewire --features tilewire/candle --example \
                            grouped_gemm --config profile.dev.debug=false --config \
                            profile.dev.opt-level=0";

fn api(root: &Path) -> Outcome {
    match crate::api::check(root, false) {
        crate::api::Verdict::Problems(p) => from_problems(&p),
        crate::api::Verdict::Skipped(why) => {
            println!("{why}: skipped");
            Outcome::skip(NOT_INSTALLED)
        }
    }
}

/// A tool that comes as a Python wheel. `None` if it cannot be installed here.
pub fn wheel(root: &Path, o: &mut Outcome, spec: &str) -> Option<PathBuf> {
    let site = root.join("target/python-tools").join(spec);
    if !site.exists() {
        let dir = site.display().to_string();
        let args = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", &dir, spec];
        if !exec(root, "python3", &args, Duration::from_secs(300)) {
            println!("{spec} cannot be installed here: skipped");
            o.skipped.add(NOT_INSTALLED, 1);
            return None;
        }
        o.downloaded += size_of(&site);
    }
    let program = spec.split('=').next().unwrap_or(spec);
    Some(site.join("bin").join(program))
}

/// Spelling of everything that is tracked; exceptions are in `_typos.toml`.
fn spelling(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    if let Some(program) = wheel(root, &mut o, "typos==1.52.0") {
        let program = program.display().to_string();
        o.add(&one(exec(root, &program, &["--format", "brief"], Duration::from_secs(60))));
    }
    o
}

/// Runs the facade's examples; each asserts what it shows.
fn examples(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    let optimised = EXAMPLES.map(|name| format!("target/release/examples/{name}"));
    for place in optimised.into_iter().chain([format!("target/debug/examples/{CANDLE}")]) {
        let program = root.join(place).display().to_string();
        o.add(&one(exec(root, &program, &[], Duration::from_secs(300))));
    }
    o
}

/// Runs the README's first command: it must end in time, and the loss must fall.
fn train(root: &Path) -> Outcome {
    let metrics = root.join("target/train.jsonl").display().to_string();
    let args = [
        "train",
        "--data",
        "docs",
        "--ranks",
        "4",
        "--tp",
        "2",
        "--cp",
        "2",
        "--steps",
        "60",
        "--metrics",
        &metrics,
    ];
    let bin = binary(root).display().to_string();
    if !exec(root, &bin, &args, Duration::from_secs(90)) {
        return one(false);
    }
    let text = std::fs::read_to_string(&metrics).unwrap_or_default();
    let losses: Vec<f64> = text
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok()?["loss"].as_f64())
        .collect();
    let fell = match losses[..] {
        [first, .., last] => losses.len() == 60 && last <= 0.6 * first,
        _ => false,
    };
    println!("loss {:?} -> {:?}", losses.first(), losses.last());
    one(fell)
}

pub fn binary(root: &Path) -> PathBuf {
    root.join("target/release/tilewire")
}

fn verify(root: &Path) -> Outcome {
    let bin = binary(root).display().to_string();
    one(exec(root, &bin, &["verify", "--ranks", "1,2,3,4,8", "--quiet"], Duration::from_secs(600)))
}

/// The same verification with processes, under our own launcher, Open MPI and MPICH.
fn launchers(root: &Path) -> Outcome {
    let bin = binary(root).display().to_string();
    let limit = Duration::from_secs(600);
    let mut o = one(exec(root, &bin, &["run", "-n", "4", "--", &bin, "verify", "--quiet"], limit));
    // By the names that Debian gives them where both are installed.
    let open_mpi = ["--allow-run-as-root", "--oversubscribe"];
    for (names, package, flags) in [
        (&["mpirun.openmpi", "mpirun"][..], "openmpi-bin", &open_mpi[..]),
        (&["mpiexec.mpich", "mpiexec.hydra"], "mpich", &[]),
    ] {
        let there = || names.iter().find(|n| has(n));
        let program = there().or_else(|| install_apt(package).then(there).flatten());
        let Some(program) = program else {
            println!("{} is not here and cannot be installed: skipped", names[0]);
            o.skipped.add(NOT_INSTALLED, 1);
            continue;
        };
        let args = [flags, &["-n", "4", &bin, "verify", "--quiet"]].concat();
        o.add(&one(exec(root, program, &args, limit)));
    }
    o
}

fn has(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

fn install_apt(package: &str) -> bool {
    let quiet = |args: &[&str]| {
        Command::new("apt-get")
            .args(args)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    };
    quiet(&["update", "-qq"]) && quiet(&["install", "-y", "-qq", package])
}

/// Ranks started by `torchrun` join its store.
fn torchrun(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    let Some(site) = crate::python::torch_site(root, &mut o) else { return o };
    let bin = binary(root).display().to_string();
    let script = "import sys; sys.path.insert(0, sys.argv.pop(1)); \
                  from torch.distributed.run import main; main(sys.argv[1:])";
    let dir = site.display().to_string();
    let args =
        ["-c", script, &dir, "--nproc-per-node", "4", "--no-python", &bin, "verify", "--quiet"];
    o.add(&one(exec(root, "python3", &args, Duration::from_secs(600))));
    o
}

pub fn size_of(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => size_of(&e.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_stage_has_is_refused() {
        assert_eq!(wanted(None, Extent::Usual).unwrap().len(), STAGES.len());
        assert_eq!(wanted(Some("tid"), Extent::Usual).unwrap()[0].name, "tidy");
        let e = wanted(Some("tydi"), Extent::Usual).err().unwrap();
        assert!(e.contains("tydi") && e.contains("tidy, acceptance"), "{e}");
    }
}
