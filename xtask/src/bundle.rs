//! `cargo xtask gpu-bundle`: a folder with everything that a machine with GPUs needs to check and
//! measure tilewire, and nothing to install there but the driver.
//!
//! `target/gpu-bundle/`: `run.sh`, and packed for it the command and test programs, and the folder
//! `cubins` (where programs look for kernels that were built with them).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// Most bytes of a bundle: it travels.
const MAX_BYTES: u64 = 40 << 20;

/// The files that are packed without being built: the runner, its interposer, a baseline.
const TEXTS: [(&str, &str); 14] = [
    ("run.sh", include_str!("../bundle/run.sh")),
    ("run.py", include_str!("../bundle/run.py")),
    ("configs.py", include_str!("../bundle/configs.py")),
    ("judges.py", include_str!("../bundle/judges.py")),
    ("modes.py", include_str!("../bundle/modes.py")),
    ("faults.py", include_str!("../bundle/faults.py")),
    ("drills.py", include_str!("../bundle/drills.py")),
    ("evidence.py", include_str!("../bundle/evidence.py")),
    ("benches.py", include_str!("../bundle/benches.py")),
    ("nomulticast.c", include_str!("../bundle/nomulticast.c")),
    ("jax_rates.py", include_str!("../bundle/jax_rates.py")),
    ("shapes.py", include_str!("../bundle/shapes.py")),
    ("torch_rates.py", include_str!("../bundle/torch_rates.py")),
    ("torch_symm.py", include_str!("../bundle/torch_symm.py")),
];

/// Makes the bundle; what went wrong.
pub fn make(root: &Path, archs: &[String], nvrtc: Option<&Path>) -> Vec<String> {
    match try_make(root, archs, nvrtc) {
        Ok(text) => {
            println!("{text}");
            Vec::new()
        }
        Err(why) => vec![why],
    }
}

fn try_make(root: &Path, archs: &[String], nvrtc: Option<&Path>) -> Result<String, String> {
    let dir = root.join("target/gpu-bundle");
    let commit = commit_of(root);
    if dir.exists() {
        fs::remove_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    let cubins = dir.join("cubins");
    fs::create_dir_all(&cubins).map_err(|e| format!("{}: {e}", cubins.display()))?;
    let programs = programs(root, commit.as_deref())?;
    for (name, from) in &programs {
        let to = dir.join(name);
        fs::copy(from, &to).map_err(|e| format!("{}: {e}", from.display()))?;
        output(Command::new("strip").arg(&to))?;
    }
    for (name, text) in TEXTS {
        let to = dir.join(name);
        let mode = fs::Permissions::from_mode(if name.ends_with(".sh") { 0o755 } else { 0o644 });
        fs::write(&to, text)
            .and_then(|()| fs::set_permissions(&to, mode))
            .map_err(|e| format!("{}: {e}", to.display()))?;
    }
    if let Some(commit) = &commit {
        // run.py puts it into each of its lines.
        let to = dir.join("commit");
        fs::write(&to, commit).map_err(|e| format!("{}: {e}", to.display()))?;
    }
    let program = dir.join("tilewire");
    let wheel = nvrtc.map_or_else(|| crate::kernels::nvrtc_wheel(root), |_| None);
    let mut compile = Command::new(&program);
    compile.args(["kernels", "compile", "--arch", &archs.join(","), "--out"]).arg(&cubins);
    if let Some(lib) = nvrtc.or(wheel.as_deref()) {
        compile.arg("--nvrtc").arg(lib);
    }
    output(&mut compile)?;
    let mut keys = Vec::new();
    for arch in archs {
        let list = ["kernels", "list", "--json", "--arch", arch];
        keys.extend(keys_of(&output(Command::new(&program).args(list))?));
    }
    check_keys(&cubins, &keys)?;
    pack(&dir, "cubins")?;
    let apart = dir.join("programs");
    fs::create_dir_all(&apart).map_err(|e| format!("{}: {e}", apart.display()))?;
    for name in programs.keys() {
        fs::rename(dir.join(name), apart.join(name)).map_err(|e| format!("{name}: {e}"))?;
    }
    pack(&dir, "programs")?;
    let sizes = sizes(&dir);
    check_sizes(&sizes, MAX_BYTES)?;
    let total: u64 = sizes.values().sum();
    Ok(format!(
        "{}: commit {}, {:.1} MiB, {} kernels for {}",
        dir.display(),
        commit.as_deref().unwrap_or("unknown"),
        total as f64 / f64::from(1 << 20),
        keys.len(),
        archs.join(", ")
    ))
}

/// Packs a folder of `dir` as `NAME.tar.xz`, in its place.
fn pack(dir: &Path, name: &str) -> Result<(), String> {
    let script = "import sys, tarfile\n\
        with tarfile.open(sys.argv[1] + '.tar.xz', 'w:xz') as f: f.add(sys.argv[1])";
    output(Command::new("python3").args(["-c", script, name]).current_dir(dir))?;
    fs::remove_dir_all(dir.join(name)).map_err(|e| format!("{name}: {e}"))
}

/// The commit of a tree, with `-dirty` if it holds something else; none where git does not know.
fn commit_of(root: &Path) -> Option<String> {
    let git = |args: &[&str]| {
        let done = Command::new("git").args(args).current_dir(root).stdin(Stdio::null()).output();
        let done = done.ok().filter(|d| d.status.success())?;
        Some(String::from_utf8_lossy(&done.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain"]).is_none_or(|s| !s.is_empty());
    Some(if changed { commit + "-dirty" } else { commit })
}

/// Builds the programs: their names in the bundle, and where they are. Only the command has the
/// commit in it.
fn programs(root: &Path, commit: Option<&str>) -> Result<BTreeMap<String, PathBuf>, String> {
    let tests = ["ops", "nn"].map(|c| gpu_tests(&root.join(format!("crates/{c}/tests")))).concat();
    let tests: Vec<&str> = tests.iter().flat_map(|t| ["--test", t]).collect();
    let build = "build --release -p tilewire-cli -p tilewire-symm -p tilewire-ops -p xtask \
                 --bin tilewire --bin xtask --example symm_checks --example rates";
    let conformance = "test --release --no-run -p tilewire-symm -p tilewire-ops -p tilewire-nn --test conformance";
    let device = "test --release --no-run -p tilewire-device --lib";
    let mut found = BTreeMap::new();
    for (line, more) in [(build, &[][..]), (conformance, &tests), (device, &[])] {
        println!("$ cargo {line} {}", more.join(" "));
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
        cargo.args(line.split_whitespace()).args(more).current_dir(root);
        cargo.envs(commit.map(|c| ("TILEWIRE_COMMIT", c)));
        let json = output(cargo.arg("--message-format=json-render-diagnostics"))?;
        found.extend(executables(&json));
    }
    for name in ["tilewire", "xtask", "symm_checks", "conformance", "gpu", "device"] {
        if !found.contains_key(name) {
            return Err(format!("cargo built no `{name}`"));
        }
    }
    Ok(found)
}

/// Tests of operations on GPUs: `gpu.rs`, `gpu_team.rs` ...
fn gpu_tests(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = files.filter_map(|e| e.file_name().into_string().ok());
    let tests = names
        .filter(|n| n.starts_with("gpu"))
        .filter_map(|n| Some(n.strip_suffix(".rs")?.to_owned()));
    let mut tests: Vec<String> = tests.collect();
    tests.sort();
    tests
}

/// Programs in cargo's messages; the tests of a library are called as its crate without `tilewire`.
fn executables(json: &str) -> BTreeMap<String, PathBuf> {
    let messages = json.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let program = |m: Value| {
        let name = m["target"]["name"].as_str()?.trim_start_matches("tilewire_").to_owned();
        Some((name, PathBuf::from(m["executable"].as_str()?)))
    };
    messages.filter_map(program).collect()
}

/// Runs a command; its standard output.
fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{name} cannot be started: {e}"))?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    match done.status.success() {
        true => Ok(text),
        // Cargo's messages are for programs; what people read went to standard error.
        false => {
            let lines: Vec<_> = text.lines().filter(|l| !l.starts_with('{')).collect();
            Err(format!("{name} failed ({}) {}", done.status, lines.join("\n")))
        }
    }
}

/// Keys in the rows of `tilewire kernels list --json`.
fn keys_of(rows: &str) -> Vec<String> {
    let rows = rows.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    rows.filter_map(|r| r["key"].as_str().map(str::to_owned)).collect()
}

/// Every key has its machine code, under the name that programs look for.
fn check_keys(cubins: &Path, keys: &[String]) -> Result<(), String> {
    if keys.is_empty() {
        return Err("no kernel is listed".to_owned());
    }
    let has = |k: &&String| {
        let code = fs::read(cubins.join(format!("{k}.cubin"))).unwrap_or_default();
        code.starts_with(b"\x7fELF")
    };
    let missing: Vec<&str> = keys.iter().filter(|k| !has(k)).map(|k| &**k).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("{}: no machine code of {}", cubins.display(), missing.join(", "))),
    }
}

/// Bytes of every file below `dir`, by its path there.
fn sizes(dir: &Path) -> BTreeMap<PathBuf, u64> {
    let mut out = BTreeMap::new();
    for e in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = PathBuf::from(e.file_name());
        match e.metadata() {
            Ok(m) if m.is_dir() => {
                out.extend(sizes(&e.path()).into_iter().map(|(p, n)| (name.join(p), n)));
            }
            Ok(m) => drop(out.insert(name, m.len())),
            Err(_) => {}
        }
    }
    out
}

fn check_sizes(sizes: &BTreeMap<PathBuf, u64>, most: u64) -> Result<(), String> {
    let total: u64 = sizes.values().sum();
    if total <= most {
        return Ok(());
    }
    let mut list: Vec<_> = sizes.iter().collect();
    list.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    let list: Vec<_> =
        list.iter().take(8).map(|(p, n)| format!("  {n:>10} {}", p.display())).collect();
    Err(format!("the bundle has {total} bytes, the most is {most}:\n{}", list.join("\n")))
}

#[cfg(test)]
mod tests;
