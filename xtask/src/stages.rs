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
    stage("dependencies", |root, _| dependencies(root)),
    stage("kernels", |root, _| kernels(root)),
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
        for why in o.skipped.too_many() {
            println!("{why}");
            o.failed += 1;
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
        total.add(&o);
    }
    if list {
        return ExitCode::SUCCESS;
    }
    if total.skipped.total() > 0 {
        println!("skipped: {}", total.skipped.text());
    }
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped.total());
    ExitCode::from(u8::from(total.failed > 0))
}

fn from_problems(problems: &[String]) -> Outcome {
    problems.iter().for_each(|p| println!("{p}"));
    Outcome {
        passed: usize::from(problems.is_empty()),
        failed: problems.len(),
        ..Outcome::default()
    }
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
    for what in [&["--package", "tilewire-cli", "--bins"][..], &examples] {
        let args = [&["build", "--release"][..], what, &python].concat();
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
        problems.iter().for_each(|p| println!("{p}"));
        o.passed += tally.right;
        o.failed += problems.len();
    }
    o
}

const EXAMPLES: [&str; 3] = ["ag_gemm", "expert_layer", "survive"];

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

/// Licences, sources and forbidden dependencies, by `deny.toml`. Advisories need the network and
/// are left to `cargo deny check advisories`.
fn dependencies(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    let place = root.join("target/tools");
    let program = place.join("bin/cargo-deny");
    if !program.exists() {
        let to = place.display().to_string();
        // Optimised it takes six times as long to build, to save a second of its run.
        let fast = ["--profile", "dev", "--config", "profile.dev.debug=false"];
        let which = ["--locked", "--version", "0.20.2", "--root", &to, "cargo-deny"];
        let args = [&["install", "--quiet"][..], &fast, &which].concat();
        if !exec(root, &cargo(), &args, Duration::from_secs(900)) {
            println!("cargo-deny cannot be installed here: skipped");
            o.skipped.add(NOT_INSTALLED, 1);
            return o;
        }
        o.downloaded += size_of(&place);
    }
    // It looks at the crates of every platform; a build has fetched those of this one.
    if !exec(root, &cargo(), &["fetch", "--quiet", "--locked"], Duration::from_secs(300)) {
        println!("crates of other platforms cannot be fetched here");
    }
    let program = program.display().to_string();
    let args = ["--offline", "--log-level", "error", "check", "bans", "licenses", "sources"];
    o.add(&one(exec(root, &program, &args, Duration::from_secs(60))));
    o
}

/// The folder of the pinned compiler, and below it the folder of its libraries.
const WHEEL: &str = "target/python-nvrtc";
const WHEEL_LIB: &str = "nvidia/cu13/lib";

/// The folder of the pinned compiler, fetched if it is not there; none where it cannot be.
pub fn nvrtc_wheel(root: &Path) -> Option<PathBuf> {
    let site = root.join(WHEEL);
    if !site.join("nvidia").exists() {
        let dir = site.display().to_string();
        let wheel = "nvidia-cuda-nvrtc==13.0.88";
        let args = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", &dir, wheel];
        if !exec(root, "python3", &args, Duration::from_secs(900)) {
            println!("{wheel} cannot be installed here");
            return None;
        }
    }
    Some(site.join(WHEEL_LIB)).filter(|p| p.exists())
}

/// Compiles every kernel for three architectures with the pinned NVRTC wheel; needs no GPU. What
/// cannot be fetched is a failure: nothing else shows that the kernels compile.
fn kernels(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    let there = root.join(WHEEL).join("nvidia").exists();
    // Twice, as other fetched libraries.
    let Some(lib) = nvrtc_wheel(root).or_else(|| nvrtc_wheel(root)) else { return one(false) };
    if !there {
        o.downloaded = size_of(&root.join(WHEEL));
    }
    // As a user would, who has the wheel and no GPU.
    let lib = lib.display().to_string();
    let bin = binary(root).display().to_string();
    let args = ["kernels", "compile", "--nvrtc", &lib];
    let text = |args: &[&str]| -> (bool, String) {
        let done = Command::new(&bin)
            .args(args)
            .current_dir(root)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output();
        done.map_or((false, String::new()), |d| {
            (d.status.success(), String::from_utf8_lossy(&d.stdout).into_owned())
        })
    };
    println!("$ {bin} {} --arch {}", args.join(" "), ARCHS.join(","));
    let (ended_well, rows) = text(&[&args[..], &["--arch", &ARCHS.join(","), "--json"]].concat());
    let listed = ARCHS.map(|arch| text(&["kernels", "list", "--json", "--arch", arch]).1).concat();
    let problems = kernel_problems(ended_well, &listed, &rows);
    println!("{} kernels of {} units", rows.lines().count(), listed.lines().count());
    o.add(&from_problems(&problems));
    o
}

/// Architectures that every kernel is compiled for.
const ARCHS: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

/// Returns the problems of a run of `kernels compile`: its status, the rows of `kernels list` for
/// the same architectures, its own rows. It stops at the first unit that does not compile, behind
/// good rows.
fn kernel_problems(ended_well: bool, listed: &str, compiled: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if !ended_well {
        problems.push("`kernels compile` failed".to_owned());
    }
    let mut parse = |text: &str| -> Vec<serde_json::Value> {
        let rows = text.lines().map(|l| serde_json::from_str(l).map_err(|e| format!("{l}: {e}")));
        let (good, bad): (Vec<_>, Vec<_>) = rows.partition(Result::is_ok);
        problems.extend(bad.into_iter().filter_map(Result::err));
        good.into_iter().flatten().collect()
    };
    let (listed, compiled) = (parse(listed), parse(compiled));
    for arch in ARCHS {
        if !listed.iter().any(|l| l["arch"] == arch) {
            problems.push(format!("no unit is listed for {arch}"));
        }
    }
    for l in &listed {
        if !compiled.iter().any(|k| k["key"] == l["key"]) {
            problems.push(format!("no row of {} {} {}", l["unit"], l["variant"], l["arch"]));
        }
    }
    for k in &compiled {
        // A missing field is a fault, too.
        let good = k["spill_bytes"] == 0
            && k["serialised"] == false
            && k["cubin_bytes"].as_u64() > Some(0);
        if !good {
            problems.push(format!("spills, is serialised or has no code: {k}"));
        }
    }
    problems
}

/// Runs the facade's examples; each asserts what it shows.
fn examples(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    for name in EXAMPLES {
        let program = root.join("target/release/examples").join(name).display().to_string();
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
    use serde_json::json;

    fn rows(rows: &[serde_json::Value]) -> String {
        rows.iter().map(|r| format!("{r}\n")).collect()
    }

    /// Two units for each architecture, and the rows of a run that compiled them.
    fn all() -> (Vec<serde_json::Value>, Vec<serde_json::Value>) {
        let units = ARCHS.iter().flat_map(|arch| ["a.cu", "b.cu"].map(|unit| (unit, *arch)));
        let listed = units.map(|(unit, arch)| {
            json!({"unit": unit, "variant": "", "arch": arch, "key": format!("{unit}-{arch}")})
        });
        let listed: Vec<_> = listed.collect();
        let compiled = listed.iter().map(|l| {
            let mut k = l.clone();
            k["spill_bytes"] = 0.into();
            k["serialised"] = false.into();
            k["cubin_bytes"] = 100.into();
            k
        });
        let compiled = compiled.collect();
        (listed, compiled)
    }

    #[test]
    fn a_name_that_no_stage_has_is_refused() {
        assert_eq!(wanted(None, Extent::Usual).unwrap().len(), STAGES.len());
        assert_eq!(wanted(Some("tid"), Extent::Usual).unwrap()[0].name, "tidy");
        let e = wanted(Some("tydi"), Extent::Usual).err().unwrap();
        assert!(e.contains("tydi") && e.contains("tidy, acceptance"), "{e}");
    }

    #[test]
    fn a_unit_that_does_not_compile_is_noticed() {
        let (listed, compiled) = all();
        let told = |ended_well, compiled: &[serde_json::Value]| {
            kernel_problems(ended_well, &rows(&listed), &rows(compiled))
        };
        assert_eq!(told(true, &compiled), [""; 0]);
        // The compiler stopped at the second unit of sm_80: the row before it is good.
        let stopped = told(false, &compiled[..1]);
        assert_eq!(stopped.len(), 1 + 5, "{stopped:?}");
        assert!(stopped[0].contains("failed") && stopped[5].contains("sm_100a"), "{stopped:?}");
        assert_eq!(told(false, &compiled).len(), 1, "every row, and a status that says otherwise");
        let left_out = told(true, &compiled[..5]);
        assert!(left_out.len() == 1 && left_out[0].contains("b.cu"), "{left_out:?}");
        for (field, value) in [
            ("spill_bytes", json!(8)),
            ("serialised", json!(true)),
            ("cubin_bytes", json!(0)),
            ("serialised", json!(null)),
        ] {
            let mut bad = compiled.clone();
            bad[3][field] = value;
            assert_eq!(told(true, &bad).len(), 1, "{field}");
        }
        // Nothing listed is nothing compiled.
        assert_eq!(kernel_problems(true, "", "").len(), ARCHS.len());
        assert_eq!(kernel_problems(true, &rows(&listed), "no row\n").len(), 1 + listed.len());
    }
}
