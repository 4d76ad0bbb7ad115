//! The public interface as text: every signature, every default, every flag, in `tests/api/`.
//!
//! A change of it is a decision: `cargo xtask api --bless` writes the files anew, and the digest of
//! the folder must stand in CHANGELOG.md beside the words that describe the change.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Crates whose interface programs can use.
const CRATES: [&str; 7] = [
    "tilewire",
    "tilewire-core",
    "tilewire-boot",
    "tilewire-device",
    "tilewire-symm",
    "tilewire-ops",
    "tilewire-nn",
];

/// The result of a check.
pub enum Verdict {
    Problems(Vec<String>),
    /// The compiler here writes its documentation in another format.
    Skipped(String),
}

/// Compares `tests/api` with the sources, or writes it.
pub fn check(root: &Path, bless: bool) -> Verdict {
    let mut problems = Vec::new();
    let documented = document(root);
    for name in CRATES {
        match documented.clone().and_then(|()| signatures(root, name)) {
            Ok(text) => compare(root, name, &text, bless, &mut problems),
            Err(why) if why.contains("format version") => return Verdict::Skipped(why),
            Err(why) => problems.push(format!("{name}: {why}")),
        }
    }
    match flags(root) {
        Ok(text) => compare(root, "cli", &text, bless, &mut problems),
        Err(why) => problems.push(why),
    }
    Verdict::Problems(problems)
}

fn compare(root: &Path, name: &str, text: &str, bless: bool, problems: &mut Vec<String>) {
    let path = root.join(format!("tests/api/{name}.txt"));
    if bless {
        let written =
            fs::create_dir_all(root.join("tests/api")).and_then(|()| fs::write(&path, text));
        problems.extend(written.err().map(|e| format!("{}: {e}", path.display())));
        return;
    }
    let old = fs::read_to_string(&path).unwrap_or_default();
    if old == text {
        return;
    }
    let only = |a: &str, b: &str, mark: &str| {
        let b: std::collections::BTreeSet<&str> = b.lines().collect();
        let lines = a.lines().filter(|l| !b.contains(l)).take(10);
        lines.map(|l| format!("  {mark} {l}")).collect::<Vec<_>>()
    };
    problems.push(format!("tests/api/{name}.txt: the interface is another; if that is meant, run `cargo xtask api --bless` and say so in CHANGELOG.md"));
    problems.extend(only(&old, text, "-"));
    problems.extend(only(text, &old, "+"));
}

/// Writes the documentation of the crates as JSON, all in one run of cargo, so that no processor
/// waits for one crate.
fn document(root: &Path) -> Result<(), String> {
    // The JSON output is unlocked for rustdoc alone: the compiler with that variable would build
    // everything anew.
    let target = root.join("target");
    let rustdoc = target.join("rustdoc-json");
    fs::write(&rustdoc, "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n")
        .and_then(|()| fs::set_permissions(&rustdoc, fs::Permissions::from_mode(0o755)))
        .map_err(|e| format!("{}: {e}", rustdoc.display()))?;
    let out = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .args(["doc", "--quiet", "--no-deps", "--lib", "--target-dir"])
        .arg(&target)
        .args(CRATES.iter().flat_map(|name| ["--package", name]))
        .env("RUSTDOC", &rustdoc)
        .env("RUSTDOCFLAGS", "-Z unstable-options --output-format json")
        .current_dir(root)
        .output()
        .map_err(|e| format!("cargo doc: {e}"))?;
    if !out.status.success() {
        return Err(String::from_utf8_lossy(&out.stderr).into_owned());
    }
    Ok(())
}

/// The public items of a crate, one line each.
fn signatures(root: &Path, name: &str) -> Result<String, String> {
    let json = root.join("target/doc").join(format!("{}.json", name.replace('-', "_")));
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .map_err(|e| e.to_string())?;
    Ok(api.items().map(|i| format!("{i}\n")).collect())
}

/// Help of the program and of all its commands.
fn flags(root: &Path) -> Result<String, String> {
    let program = root.join("target/release/tilewire");
    let help = |args: &[&str]| {
        let out = Command::new(&program)
            .args(args)
            .arg("--help")
            .env("COLUMNS", "100")
            .output()
            .map_err(|e| format!("{}: {e}; build it first", program.display()))?;
        if !out.status.success() {
            return Err(format!("{} {} --help: {}", program.display(), args.join(" "), out.status));
        }
        Ok::<_, String>(String::from_utf8_lossy(&out.stdout).into_owned())
    };
    let mut text = String::new();
    let mut all = vec![Vec::new()];
    while let Some(command) = all.pop() {
        let args: Vec<&str> = command.iter().map(String::as_str).collect();
        let of = help(&args)?;
        text += &format!("\n$ {} --help\n{of}", [&["tilewire"], &args[..]].concat().join(" "));
        let inner = commands_of(&of).into_iter().rev();
        all.extend(inner.map(|name| [&command[..], &[name]].concat()));
    }
    Ok(text.trim_start().to_owned())
}

/// Commands that a help lists.
fn commands_of(help: &str) -> Vec<String> {
    let list = help.split("\nCommands:").nth(1).and_then(|t| t.split("\n\n").next()).unwrap_or("");
    let lines = list.lines().filter(|l| l.starts_with("  ") && !l.starts_with("   "));
    let names = lines.filter_map(|l| l.split_whitespace().next()).filter(|c| *c != "help");
    names.map(str::to_owned).collect()
}

/// One problem if CHANGELOG.md does not carry the digest of `tests/api`.
pub fn changelog(root: &Path) -> Option<String> {
    let dir = root.join("tests/api");
    let mut names: Vec<_> = fs::read_dir(&dir).ok()?.flatten().map(|e| e.path()).collect();
    names.sort();
    let mut hash = blake3::Hasher::new();
    for path in names {
        hash.update(path.file_name()?.as_encoded_bytes());
        hash.update(&fs::read(&path).ok()?);
    }
    let digest = &hash.finalize().to_hex()[..12];
    let log = fs::read_to_string(root.join("CHANGELOG.md")).unwrap_or_default();
    let unreleased = log.split("\n## ").nth(1).unwrap_or_default();
    (!unreleased.contains(digest)).then(|| {
        format!(
            "CHANGELOG.md: tests/api has changed; describe the change in the first section, and end \
             that section with `Interface: {digest}`"
        )
    })
}
