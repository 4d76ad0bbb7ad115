//! Stage `python`: the wheel, and its tests on one to four ranks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tilewire_testing::Lack;

use crate::outcome::{BY_PYTEST, NOT_INSTALLED, Outcome};
use crate::stages::{OFF, exec, named, one, size_of, wheel};

#[path = "../../crates/ops/tests/gpu/driver.rs"]
pub mod driver;

/// A folder of wheels: its name in `target`, the wheels, and a module that is there then.
struct Site {
    name: &'static str,
    wheels: &'static [&'static str],
    module: &'static str,
}

/// Pinned like everything that tests need; torch is the oldest that is served.
const TORCH: Site = Site { name: "python-torch", wheels: &["torch==2.11.0"], module: "torch" };
const TOOLS: Site = Site {
    name: "python-test",
    wheels: &["pytest==9.2.0", "numpy==2.4.6", "safetensors==0.8.0"],
    module: "safetensors",
};
const TYPES: Site = Site { name: "python-types", wheels: &["mypy==2.4.1"], module: "mypy" };
/// The oldest that is served; the newest needs another Python, and is tried by hand.
const JAX: Site =
    Site { name: "python-jax", wheels: &["jax==0.10.2", "numpy==2.4.6"], module: "jax" };
const MATURIN: &str = "maturin==1.16.0";

/// Returns the folder of torch with its dependencies, fetched if it is not there; none where it
/// cannot be.
pub fn torch_site(root: &Path, o: &mut Outcome) -> Option<PathBuf> {
    site(root, o, &TORCH)
}

/// Bytes that this run has fetched into each folder of wheels, not yet reported by a stage. Who
/// installs holds it.
static FETCHED: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

/// Fetches all wheels that stages will ask for. A fetch that fails is tried again by its stage,
/// which reports it.
pub fn fetch_ahead(root: &Path) {
    for site in [&TORCH, &TOOLS, &TYPES, &JAX] {
        site_of(root, site);
    }
}

/// The folder of `what`, fetched if it is not there; none where it cannot be.
fn site(root: &Path, o: &mut Outcome, what: &Site) -> Option<PathBuf> {
    let site = site_of(root, what);
    match &site {
        Some(_) => o.downloaded += fetched().remove(what.name).unwrap_or(0),
        None => o.skipped.add(NOT_INSTALLED, 1),
    }
    site
}

fn fetched() -> MutexGuard<'static, BTreeMap<&'static str, u64>> {
    FETCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn site_of(root: &Path, what: &Site) -> Option<PathBuf> {
    let &Site { name, wheels, module } = what;
    let mut fetched = fetched();
    let site = root.join("target").join(name);
    if !site.join(module).exists() {
        // Half a folder, of a run that was ended, is none.
        let half = root.join("target").join(format!("{name}.half"));
        std::fs::remove_dir_all(&half).ok();
        let dir = half.display().to_string();
        // With their dependencies: torch does not import without its CUDA libraries.
        let mut args = vec!["-m", "pip", "install", "--quiet", "--no-compile", "--target", &dir];
        args.extend(wheels);
        let done = exec(root, "python3", &args, Duration::from_secs(1500));
        std::fs::remove_dir_all(&site).ok();
        if !done || std::fs::rename(&half, &site).is_err() {
            println!("{} cannot be installed here: skipped", wheels.join(", "));
            return None;
        }
        fetched.insert(name, size_of(&site));
    }
    Some(site)
}

/// Builds the wheel and unpacks it into a folder of its own, as `pip install` would.
fn build(root: &Path, o: &mut Outcome) -> Option<PathBuf> {
    let maturin = wheel(root, o, MATURIN)?.display().to_string();
    let out = root.join("target/wheels");
    std::fs::remove_dir_all(&out).ok();
    let dir = out.display().to_string();
    let manifest = root.join("python/Cargo.toml").display().to_string();
    let args = ["build", "--release", "--auditwheel", "skip", "--quiet", "--manifest-path"];
    let args = [&args[..], &[&manifest, "--out", &dir, "--interpreter", "python3"]].concat();
    let built = exec(root, &maturin, &args, Duration::from_secs(1500));
    let mut files = std::fs::read_dir(&out).into_iter().flatten().flatten().map(|e| e.path());
    let Some(file) = files.next().filter(|_| built) else {
        o.add(&one(false));
        return None;
    };
    let size = std::fs::metadata(&file).map_or(0, |m| m.len());
    println!("{} is {:.1} MB", file.display(), size as f64 / 1e6);
    // Without kernels: those are compiled, or come from a bundle.
    o.add(&one(size < 8_000_000));
    let site = root.join("target/python-wheel");
    std::fs::remove_dir_all(&site).ok();
    std::fs::remove_dir_all(root.join(CACHE)).ok();
    let (site_arg, file) = (site.display().to_string(), file.display().to_string());
    let args = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        &site_arg,
        &file,
    ];
    let done = exec(root, "python3", &args, Duration::from_secs(120));
    o.add(&one(done));
    // Kernels that somebody put into the package are machine code, which emulated devices do not
    // run.
    std::fs::remove_dir_all(site.join("tilewire/cubins")).ok();
    done.then_some(site)
}

/// Compiled modules of all wheels and tests. Emptied with each new wheel, whose files may differ
/// from those before in neither size nor time.
const CACHE: &str = "target/python-cache";

/// Lets a Python import from `path`. What it compiles stays for the next one, outside of the
/// wheels: some hundred processes import torch, and compiling takes half of that.
fn imports<'a>(root: &Path, path: &str, python: &'a mut Command) -> &'a mut Command {
    python
        // Not beside the sources, which Python would take in place of the wheel.
        .current_dir(root.join("target"))
        .env("PYTHONPATH", path)
        .env("TW_PROGRAM", root.join("target/release/tilewire"))
        .env("PYTHONPYCACHEPREFIX", root.join(CACHE))
        // Each connection to torch's store asks the name service for the name of its client, on
        // both sides. An answer that is lost costs one second, in place of five.
        .env("RES_OPTIONS", "timeout:1 attempts:1")
        // A process that crashes says where, at its end, too, where pytest does that no more.
        .env("PYTHONFAULTHANDLER", "1")
        .env_remove("PYTHONDONTWRITEBYTECODE")
}

/// Runs Python with `path` as its modules; adds up the closing lines of pytest.
fn pytest(root: &Path, path: &str, args: &[&str]) -> Outcome {
    reported(root, path, args, Command::new("python3").envs(OFF))
}

/// As [`pytest`], by a command that has its variables already.
fn reported(root: &Path, path: &str, args: &[&str], python: &mut Command) -> Outcome {
    let (begun, said) = (Instant::now(), args.join(" "));
    println!("$ python3 {said}");
    python.args(args).stdin(Stdio::null());
    let out = imports(root, path, python).output();
    let Ok(out) = out else { return one(false) };
    let (text, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    eprint!("{errors}");
    let mut o = counted(&text, out.status.success());
    if o.failed > 0 {
        println!("{text}");
        o.explain(&format!("{said}: {}", out.status), &format!("{text}\n{errors}"));
    }
    println!(
        "{:>8.1} s  {} passed, {} failed: {said}",
        begun.elapsed().as_secs_f64(),
        o.passed,
        o.failed
    );
    o
}

/// Calls by raw pointers, without torch, on two devices that are emulated.
fn emulated(root: &Path, path: &str) -> Outcome {
    let Some(driver) = driver::Driver::emulated() else {
        println!("no g++: nothing runs on emulated devices: skipped");
        return Outcome::skip(&Lack::Compiler.to_string());
    };
    // By its whole name: such a program sees no folder of programs.
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let python = python.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned());
    let Ok(python) = python else { return one(false) };
    let tests = root.join("python/tests/emulated").display().to_string();
    let args = ["-m", "pytest", "-q", "-p", "no:cacheprovider", &tests];
    reported(root, path, &args, &mut driver.command(python, 2))
}

/// Runs an example on two ranks; each compares itself with dense torch.
fn example(root: &Path, path: &str, name: &str) -> bool {
    let file = root.join(format!("examples/python/{name}.py")).display().to_string();
    let args = ["-m", "torch.distributed.run", "--nproc-per-node", "2", &file];
    println!("$ python3 {}", args.join(" "));
    let mut python = Command::new("timeout");
    python
        .args(["120", "python3"])
        .args(args)
        .envs(OFF)
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null());
    let done = imports(root, path, &mut python).status();
    done.is_ok_and(|s| s.success())
}

/// The tests of JAX: devices of one process, and of two. All types on four devices; elsewhere what
/// differs with their number.
fn jax(root: &Path, path: &str) -> Outcome {
    let mut o = Outcome::default();
    let file = |name: &str| root.join("python/tests").join(name).display().to_string();
    let (runner, tests) = (file("run.py"), file("jax"));
    let alone = ["-m", "pytest", "-q", "-p", "no:cacheprovider", &tests];
    let two = [&runner, "2", "-q", &tests];
    let runs: [(&str, &str, &[&str]); 5] = [
        ("1", "1", &alone),
        ("2", "1", &alone),
        ("4", "", &alone),
        ("8", "1", &alone),
        ("2", "1", &two),
    ];
    for (devices, quick, args) in runs {
        let mut python = Command::new("python3");
        python.envs(OFF).env("TW_JAX_DEVICES", devices).env("TW_JAX_QUICK", quick);
        o.add(&reported(root, path, args, &mut python));
    }
    let example = root.join("examples/python/jax_tp.py").display().to_string();
    println!("$ python3 {example}");
    let mut python = Command::new("timeout");
    python.args(["120", "python3", &example]).envs(OFF).stdin(Stdio::null());
    let done = imports(root, path, &mut python).status();
    o.add(&named("jax_tp.py", done.is_ok_and(|s| s.success())));
    o
}

/// Compares the stubs with what is there: names, arguments, defaults.
fn stubtest(root: &Path, path: &str) -> bool {
    let file = |name: &str| root.join("python/tests/typing").join(name).display().to_string();
    let (config, allowed) = (file("mypy.ini"), file("allowlist.txt"));
    let args = ["-m", "mypy.stubtest", "tilewire", "--concise", "--mypy-config-file", &config];
    let args = [&args[..], &["--allowlist", &allowed]].concat();
    println!("$ python3 {}", args.join(" "));
    let mut python = Command::new("timeout");
    python.args(["180", "python3"]).args(args).envs(OFF).stdin(Stdio::null());
    let done = imports(root, path, &mut python).status();
    done.is_ok_and(|s| s.success())
}

/// Counts what closing lines like `2 failed, 3 passed, 1 skipped in 0.10s` report. A run that says
/// nothing, or ended badly without a failure, has failed.
fn counted(text: &str, ended_well: bool) -> Outcome {
    let mut o = Outcome::default();
    let closing = |l: &&str| l.contains(" passed") || l.contains(" failed") || l.contains(" error");
    for line in
        text.lines().filter(closing).filter(|l| l.contains(" in ") && l.ends_with(['s', ')', '=']))
    {
        for part in line.split([',', '=']) {
            let mut words = part.split_whitespace();
            let (number, what) = (words.next().and_then(|n| n.parse::<usize>().ok()), words.next());
            match (number, what) {
                (Some(n), Some("passed")) => o.passed += n,
                (Some(n), Some("failed" | "error" | "errors")) => o.failed += n,
                (Some(n), Some("skipped")) => o.skipped.add(BY_PYTEST, n),
                _ => {}
            }
        }
    }
    if o.failed == 0 && (!ended_well || o.passed == 0) {
        o.failed = 1;
    }
    o
}

/// The tests of a folder in `python/tests`.
fn folder(root: &Path, path: &str, name: &str) -> Outcome {
    let tests = root.join("python/tests").join(name).display().to_string();
    pytest(root, path, &["-m", "pytest", "-q", "-p", "no:cacheprovider", &tests])
}

/// The operations on worlds of one, two and four ranks.
fn worlds(root: &Path, path: &str) -> Outcome {
    let mut o = Outcome::default();
    let file = |name: &str| root.join("python/tests").join(name).display().to_string();
    let (runner, spmd) = (file("run.py"), file("spmd"));
    for n in ["4", "2", "1"] {
        o.add(&pytest(root, path, &[&runner, n, "-q", &spmd]));
    }
    // Preconditions are no assertions: they hold in optimised runs, too. The asserts of tests
    // vanish there: what is refused is looked at, and of the rest that it ends well. torch 2.11
    // compiles no branch in such a run.
    let (refused, rest) = (file("spmd/test_bad_input.py"), "not compiled and not compiles");
    o.add(&pytest(root, path, &["-O", &runner, "2", "-q", &refused]));
    o.add(&pytest(root, path, &["-O", &runner, "1", "-q", "-k", rest, &spmd]));
    o
}

/// The stage. Two rows of tests go side by side, as ranks mostly wait for each other; what meets
/// deadlines of seconds comes behind them, alone.
pub fn run(root: &Path) -> Outcome {
    let mut o = Outcome::default();
    let Some(torch) = torch_site(root, &mut o) else { return o };
    let Some(tools) = site(root, &mut o, &TOOLS) else { return o };
    let Some(ours) = build(root, &mut o) else { return o };
    let types = site(root, &mut o, &TYPES);
    let with_jax = site(root, &mut o, &JAX);
    let text = |paths: &[&PathBuf]| {
        paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(":")
    };
    let path = text(&[&ours, &torch, &tools]);
    // Without torch: JAX must need nothing of it.
    let jax_path = with_jax.as_ref().map(|site| text(&[&ours, site, &tools]));
    let others = || {
        let mut o = Outcome::default();
        if let Some(path) = &jax_path {
            o.add(&jax(root, path));
        }
        o.add(&emulated(root, &text(&[&ours, &tools])));
        // All that is compared is imported, so both frameworks are there.
        if let Some((types, with_jax)) = types.as_ref().zip(with_jax.as_ref()) {
            let path = text(&[&ours, &torch, &tools, types, with_jax]);
            o.add(&named("stubtest", stubtest(root, &path)));
        }
        for name in ["tp_block", "moe", "attention"] {
            o.add(&named(name, example(root, &path, name)));
        }
        o
    };
    let (first, second) = thread::scope(|t| {
        let first = t.spawn(|| worlds(root, &path));
        let second = others();
        // A row that panicked has shown nothing.
        (first.join().unwrap_or_else(|_| one(false)), second)
    });
    o.add(&first);
    o.add(&second);
    o.add(&folder(root, &path, "jobs"));
    if let Some(path) = &jax_path {
        o.add(&folder(root, path, "jax_jobs"));
    }
    o
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_added_up_and_silence_is_a_failure() {
        let all = |text: &str, ok| {
            let o = counted(text, ok);
            (o.passed, o.failed)
        };
        assert_eq!(counted("3 passed, 2 skipped in 0.1s", true).skipped.total(), 2);
        assert_eq!(
            all("51 passed, 1 skipped, 14 warnings in 7.13s\n3 passed in 0.1s", true),
            (54, 0)
        );
        assert_eq!(all("=== 2 failed, 3 passed in 0.10s ===", false), (3, 2));
        assert_eq!(all("1 error in 0.10s", false), (0, 1));
        assert_eq!(all("no tests ran in 0.01s", true), (0, 1));
        assert_eq!(all("5 passed in 0.01s", false), (5, 1));
        assert_eq!(all("", true), (0, 1));
    }
}
