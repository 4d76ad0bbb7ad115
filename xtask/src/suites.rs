//! Runs the binaries of `cargo test`: counts what ran, and how long each took.
//!
//! Not by `cargo test` itself, which runs them one after the other: half of their time some wait
//! for deadlines to pass, while others compute. Those that wait run in one row at the usual
//! priority, those that only compute beside them at a lower one. The row that is over first takes
//! what is left of those that compute, so that no processor is idle before the end.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::outcome::{Outcome, Skips};
use crate::stages::{OFF, cargo, one};

/// The number of tests that are run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// The inner loop: at most five minutes on two processors.
    Fast,
    /// The tests that must pass before a change lands.
    Usual,
    /// Also what others show, too.
    Full,
}

/// In the environment of tests under [`Extent::Full`]: they run their whole matrix.
const FULL: &str = "TW_FULL";

/// The packages with tests. Asked for all libraries, cargo builds that of Python, too, which has
/// none.
const TESTED: [&str; 3] = ["--workspace", "--exclude", "tilewire-python"];

/// Longest time of one binary.
const LIMIT: Duration = Duration::from_secs(1800);

/// Binaries that compute all the time and meet no deadline of seconds: they run beside the others,
/// in this order. Emulated devices come first, so that less of them runs beside `tilewire-ops
/// gpu_team`: where the threads of both wait for each other's processors each takes longer.
const COMPUTE: [&str; 8] = [
    "tilewire-cli emulated",
    "tilewire-kernels nvrtc",
    "tilewire-kernels emu",
    "tilewire-cli conformance",
    "tilewire-cli peers",
    "tilewire-nn ablation",
    "tilewire-symm models",
    "tilewire-ops rules",
];

/// Binaries that [`Extent::Fast`] leaves out, because they take minutes.
const SLOW: [&str; 7] = [
    "tilewire-kernels emu",
    "tilewire-kernels nvrtc",
    "tilewire-cli emulated",
    "tilewire-cli peers",
    "tilewire-cli train",
    "tilewire-ops gpu_team",
    "tilewire-ops protocol",
];

/// Binaries that only [`Extent::Full`] runs, each for a reason.
const REDUNDANT: [&str; 2] = [
    // Stage `kernels` compiles all that operations ask for by the same compiler; this adds what
    // tests define.
    "tilewire-kernels nvrtc",
    // Trains for minutes; what experts and attention compute, and their gradients, other tests hold
    // against the oracle, and stage `train` sees the loss fall.
    "tilewire-nn ablation",
];

/// A binary with tests.
#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    /// Package and target: `tilewire-ops gpu_team`, `tilewire-ops lib`.
    pub name: String,
    package: String,
    pub exe: PathBuf,
    /// The folder in which cargo would start it.
    pub dir: PathBuf,
}

impl Suite {
    /// The binary that a line of `cargo test --no-run --message-format=json` tells of.
    fn of(line: &str) -> Option<Self> {
        let v: Value = serde_json::from_str(line).ok()?;
        let exe = PathBuf::from(v["executable"].as_str()?);
        if v["profile"]["test"] != true {
            return None;
        }
        let dir = Path::new(v["manifest_path"].as_str()?).parent()?.to_path_buf();
        // The last part of `path+file:///DIR#NAME@VERSION`, or of `path+file:///DIR/NAME#VERSION`.
        let id = v["package_id"].as_str()?;
        let (place, last) = id.rsplit_once('#')?;
        let package = match last.split_once('@') {
            Some((name, _)) => name,
            None => place.rsplit('/').next()?,
        };
        let target = match v["target"]["kind"][0].as_str()? {
            "lib" | "cdylib" | "rlib" => "lib".to_owned(),
            kind => {
                let name = v["target"]["name"].as_str()?;
                if kind == "test" { name.to_owned() } else { format!("{kind} {name}") }
            }
        };
        Some(Self { name: format!("{package} {target}"), package: package.to_owned(), exe, dir })
    }

    fn is_in(&self, list: &[&str]) -> bool {
        list.contains(&&*self.name)
    }

    fn runs(&self, extent: Extent) -> bool {
        match extent {
            Extent::Fast => !self.is_in(&SLOW) && !self.is_in(&REDUNDANT),
            Extent::Usual => !self.is_in(&REDUNDANT),
            Extent::Full => true,
        }
    }

    /// As libtest and cargo name it: what [`tilewire_testing`] writes first.
    fn stem(&self) -> String {
        self.exe.file_stem().unwrap_or_default().display().to_string()
    }
}

/// The result of a test binary.
struct Ran {
    name: String,
    took: Duration,
    outcome: Outcome,
    /// The output of its failures.
    said: String,
}

/// Returns the outcome of a binary from its output and from the tests (of that binary) that did not
/// run by their own account.
fn judged(text: &str, ended_well: bool, not_run: &BTreeMap<String, String>) -> (Outcome, String) {
    let mut o = Outcome::default();
    let (mut said, mut output) = (Vec::new(), false);
    let mut failed = BTreeSet::new();
    for line in text.lines() {
        // The output of each failed test is behind those of all tests, under its name.
        output = (output || line.starts_with("---- ")) && line != "failures:";
        if output || line.contains("panicked at") || line.ends_with("FAILED") {
            said.push(line);
        }
        match line.strip_prefix("test ").and_then(|l| l.split_once(" ... ")) {
            Some((_, result)) if result.starts_with("ignored") => {
                let reason = result.trim_start_matches("ignored").trim_start_matches(", ");
                o.skipped.add(reason, 1);
            }
            Some((test, "FAILED")) => {
                failed.insert(test);
            }
            _ => {}
        }
        let Some(rest) = line.strip_prefix("test result: ") else { continue };
        let number = |what: &str| {
            rest.split("; ")
                .find_map(|p| p.strip_suffix(what))
                .and_then(|p| p.rsplit(' ').next())
                .and_then(|n| n.parse::<usize>().ok())
                .unwrap_or(0)
        };
        o.passed += number(" passed");
        o.failed += number(" failed");
    }
    if !ended_well && o.failed == 0 {
        // It ended before it could say so.
        said = text.lines().collect();
        o.failed = 1;
    }
    // One that failed behind its word has failed.
    for (_, reason) in not_run.iter().filter(|(test, _)| !failed.contains(&***test)) {
        o.skipped.add(reason, 1);
        o.passed = o.passed.saturating_sub(1);
    }
    (o, said.join("\n"))
}

/// Tests that did not run, with their reasons, by the stem of their binary. The first reason of
/// each counts.
fn not_run(text: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut all: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, '\t').map(str::to_owned);
        if let (Some(exe), Some(test), Some(why)) = (parts.next(), parts.next(), parts.next()) {
            all.entry(exe).or_default().entry(test).or_insert(why);
        }
    }
    all
}

/// The arguments and environment of the binaries.
struct With<'a> {
    /// The file for tests that did not run.
    notes: &'a Path,
    extent: Extent,
    args: &'a [&'a str],
    vars: &'a [(&'a str, &'a str)],
}

/// Runs one binary.
fn run(suite: &Suite, with: &With<'_>) -> Ran {
    let begun = Instant::now();
    let limit = LIMIT.as_secs().to_string();
    let exe = suite.exe.display().to_string();
    let mut words = vec!["timeout", "--signal=KILL", &limit, &exe];
    if suite.is_in(&COMPUTE) {
        words.splice(0..0, ["nice", "-n", "10"]);
    }
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .args(with.args)
        .current_dir(&suite.dir)
        .envs(OFF)
        .env("CARGO_MANIFEST_DIR", &suite.dir)
        .env("CARGO_PKG_NAME", &suite.package)
        .env(tilewire_testing::FILE, with.notes)
        .envs(with.vars.iter().copied())
        .stdin(Stdio::null());
    if with.extent == Extent::Full {
        command.env(FULL, "1");
    }
    let (outcome, said) = match command.output() {
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
            let all = not_run(&std::fs::read_to_string(with.notes).unwrap_or_default());
            let none = BTreeMap::new();
            judged(&text, out.status.success(), all.get(&suite.stem()).unwrap_or(&none))
        }
        Err(e) => (one(false), format!("cannot start {}: {e}", suite.exe.display())),
    };
    Ran { name: suite.name.clone(), took: begun.elapsed(), outcome, said }
}

/// Arguments with which cargo builds all tests.
fn all() -> Vec<&'static str> {
    [&TESTED[..], &["--lib", "--bins", "--tests", "--examples"]].concat()
}

/// Builds all tests, silently: [`run_all`] does it again, waits for this, and reports errors.
pub fn build_ahead(root: &Path) {
    let mut cargo = Command::new(cargo());
    cargo.args(["test", "--no-run", "--quiet"]).args(all()).current_dir(root).envs(OFF);
    cargo.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().ok();
}

/// The binaries of `cargo test`, built; none where that failed.
pub fn built(root: &Path, args: &[&str]) -> Option<Vec<Suite>> {
    println!("$ cargo test --no-run {}", args.join(" "));
    let out = Command::new(cargo())
        .args(["test", "--no-run", "--message-format=json-render-diagnostics", "--quiet"])
        .args(args)
        .current_dir(root)
        .envs(OFF)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output();
    let out = out.ok().filter(|out| out.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).lines().filter_map(Suite::of).collect())
}

/// A new file for tests that did not run.
fn notes(root: &Path) -> PathBuf {
    let notes = root.join(format!("target/did-not-run-{}", std::process::id()));
    std::fs::remove_file(&notes).ok();
    notes
}

/// One test of the binary `suite`, with more variables.
pub fn run_one(root: &Path, suite: &str, test: &str, vars: &[(&str, &str)]) -> Outcome {
    let Some(suites) = built(root, &[&TESTED[..], &["--lib"]].concat()) else { return one(false) };
    let Some(suite) = suites.iter().find(|s| s.name == suite) else { return one(false) };
    let (notes, args) = (notes(root), ["--exact", test]);
    let with = With { notes: &notes, extent: Extent::Usual, args: &args, vars };
    let ran = run(suite, &with);
    println!("{}", ran.said);
    std::fs::remove_file(&notes).ok();
    ran.outcome
}

/// The examples in the documentation. What they leave out counts as that of other tests.
pub fn run_docs(root: &Path) -> Outcome {
    let args = [&["test"], &TESTED[..], &["--doc", "--no-fail-fast"]].concat();
    println!("$ cargo {}", args.join(" "));
    let mut command = Command::new(cargo());
    command.args(args).current_dir(root).envs(OFF).stdin(Stdio::null()).stderr(Stdio::inherit());
    let Ok(out) = command.output() else { return one(false) };
    let text = String::from_utf8_lossy(&out.stdout);
    let (o, said) = judged(&text, out.status.success(), &BTreeMap::new());
    println!("{said}");
    o
}

/// The two rows: those that compute, the longest first ([`COMPUTE`] has them in this order), and
/// those that wait, in the order in which cargo names them.
fn rows(suites: &[Suite]) -> (Vec<&Suite>, Vec<&Suite>) {
    let (mut compute, wait): (Vec<_>, Vec<_>) = suites.iter().partition(|s| s.is_in(&COMPUTE));
    compute.sort_by_key(|s| COMPUTE.iter().position(|name| *name == s.name));
    (compute, wait)
}

/// Builds and runs all tests: those that compute beside those that wait.
pub fn run_all(root: &Path, extent: Extent) -> Outcome {
    let begun = Instant::now();
    let Some(mut suites) = built(root, &all()) else { return one(false) };
    println!("built in {:.1} s", begun.elapsed().as_secs_f64());
    let known: BTreeSet<&str> = suites.iter().map(|s| &*s.name).collect();
    let gone = [&COMPUTE[..], &SLOW, &REDUNDANT].concat();
    let gone: Vec<_> = gone.into_iter().filter(|n| !known.contains(n)).collect();
    let mut o = Outcome::default();
    if !gone.is_empty() {
        println!("xtask/src/suites.rs names binaries that are not there: {gone:?}");
        o.failed += 1;
    }
    suites.retain(|s| s.runs(extent));
    let notes = notes(root);
    let with = With { notes: &notes, extent, args: &[], vars: &[] };
    let (compute, wait) = rows(&suites);
    let ran = Mutex::new(Vec::new());
    let go = |s: &Suite| {
        let r = run(s, &with);
        if !r.said.is_empty() {
            println!("{}:\n{}", r.name, r.said);
        }
        ran.lock().expect("no panic").push(r);
    };
    let left = Mutex::new(compute.into_iter());
    let next = || left.lock().expect("no panic").next();
    let rest = || {
        while let Some(s) = next() {
            go(s);
        }
    };
    std::thread::scope(|t| {
        t.spawn(rest);
        wait.into_iter().for_each(go);
        rest();
    });
    std::fs::remove_file(&notes).ok();
    let ran = ran.into_inner().expect("no panic");
    println!("{}", table(&ran));
    for r in &ran {
        o.add(&r.outcome);
        if r.outcome.failed > 0 {
            o.explain(&r.name, &r.said);
        }
    }
    o
}

/// A line for each binary that has tests, slowest first.
fn table(ran: &[Ran]) -> String {
    let counts = |o: &Outcome, skipped: &Skips| o.passed + o.failed + skipped.total();
    let mut with: Vec<_> =
        ran.iter().filter(|r| counts(&r.outcome, &r.outcome.skipped) > 0).collect();
    with.sort_by_key(|r| std::cmp::Reverse(r.took));
    let line = |r: &&Ran| {
        let (o, took) = (&r.outcome, r.took.as_secs_f64());
        let failed = if o.failed > 0 { format!(", {} FAILED", o.failed) } else { String::new() };
        let skipped = o.skipped.total();
        let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
        format!("{took:>8.1} s  {:<36} {} passed{failed}{skipped}", r.name, o.passed)
    };
    with.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\nrunning 4 tests\ntest a ... ok\ntest b ... ok\ntest c ... FAILED\n\
        test d ... ignored, run by a\n\ntest result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; \
        0 filtered out; finished in 0.10s\n";

    #[test]
    fn what_did_not_run_has_not_passed() {
        let none = BTreeMap::new();
        let (o, said) = judged(SAID, false, &none);
        assert_eq!((o.passed, o.failed, &*o.skipped.text()), (2, 1, "1: run by a"));
        assert!(said.contains("test c ... FAILED"), "{said}");
        let output = "failures:\n\n---- c stdout ----\nrow 1\npanicked at x.rs:\n1 of 2\n\nfailures:\n    c\n";
        let (_, said) = judged(&format!("{SAID}{output}"), false, &none);
        assert!(said.ends_with("row 1\npanicked at x.rs:\n1 of 2\n"), "{said}");
        // Twice by one test is once, and a test of another binary is none of this one.
        let notes = not_run("x-1\tb\tno GPU\nx-1\tb\tno NCCL\ny-2\ta\tno GPU\n");
        let (o, _) = judged(SAID, false, &notes["x-1"]);
        assert_eq!((o.passed, o.failed, &*o.skipped.text()), (1, 1, "1: no GPU; 1: run by a"));
    }

    #[test]
    fn a_binary_that_ends_without_a_word_has_failed() {
        let (o, said) = judged("running 2 tests\n", false, &BTreeMap::new());
        assert!(o.failed == 1 && o.passed == 0 && said.contains("running 2"), "{said}");
    }

    #[test]
    fn each_binary_is_in_one_row_and_the_longest_comes_first() {
        let named = |name: &str| Suite {
            name: name.to_owned(),
            package: String::new(),
            exe: PathBuf::new(),
            dir: PathBuf::new(),
        };
        let names =
            ["tilewire-ops rules", "tilewire-ops lib", "tilewire-cli emulated", "tilewire-nn lib"];
        let suites = names.map(named);
        let (compute, wait) = rows(&suites);
        let of = |row: Vec<&Suite>| row.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
        assert_eq!(of(compute), [names[2], names[0]]);
        assert_eq!(of(wait), [names[1], names[3]]);
    }

    #[test]
    fn binaries_are_named_by_package_and_target() {
        let line = |id: &str, kind: &str, name: &str, test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "package_id": id, "manifest_path": "/r/crates/ops/Cargo.toml",
                "target": { "kind": [kind], "name": name }, "profile": { "test": test },
                "executable": "/r/target/debug/deps/gpu_team-0a1b",
            })
            .to_string()
        };
        let id = "path+file:///r/crates/ops#tilewire-ops@0.1.0";
        let s = Suite::of(&line(id, "test", "gpu_team", true)).unwrap();
        assert_eq!((&*s.name, &*s.stem()), ("tilewire-ops gpu_team", "gpu_team-0a1b"));
        assert!(!s.runs(Extent::Fast) && s.runs(Extent::Usual) && s.runs(Extent::Full));
        let lib = Suite::of(&line("path+file:///r/xtask#0.1.0", "bin", "xtask", true)).unwrap();
        assert_eq!(lib.name, "xtask bin xtask");
        assert_eq!(Suite::of(&line(id, "bin", "tilewire", false)), None, "built for a test");
    }
}
