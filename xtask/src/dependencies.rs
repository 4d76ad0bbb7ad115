//! Stage `dependencies`: what the crates of others may be.
//!
//! The tool takes two minutes to build, and its verdict is a function of Cargo.lock, the manifests
//! and `deny.toml`. The last line of that file is the digest of what it last passed with; the tool
//! runs where these differ, and always under `--full`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::outcome::{NOT_INSTALLED, Outcome};
use crate::stages::{cargo, exec, one, size_of};
use crate::suites::Extent;

const RULES: &str = "deny.toml";
const NOTE: &str = "# Passed with: ";

/// The digest that the rules carry.
fn noted(rules: &str) -> Option<&str> {
    rules.lines().last()?.strip_prefix(NOTE)
}

/// The rules without the digest.
fn rules(text: &str) -> String {
    text.lines().filter(|l| !l.starts_with(NOTE)).map(|l| format!("{l}\n")).collect()
}

fn note(path: &Path, digest: &str) -> std::io::Result<()> {
    let text = rules(&fs::read_to_string(path)?);
    fs::write(path, format!("{text}{NOTE}{digest}\n"))
}

/// The digest of all that the verdict depends on: the rules, Cargo.lock, and the manifests of the
/// workspace.
fn digest(root: &Path) -> Option<String> {
    let mut hash = blake3::Hasher::new();
    let mut add = |name: &str, text: &str| {
        hash.update(name.as_bytes());
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(RULES, &rules(&fs::read_to_string(root.join(RULES)).ok()?));
    add("Cargo.lock", &fs::read_to_string(root.join("Cargo.lock")).ok()?);
    let workspace = fs::read_to_string(root.join("Cargo.toml")).ok()?;
    add("Cargo.toml", &workspace);
    for member in members(&workspace) {
        add(&member, &fs::read_to_string(root.join(&member).join("Cargo.toml")).ok()?);
    }
    Some(hash.finalize().to_hex()[..32].to_owned())
}

/// The folders of `members = [...]`.
fn members(workspace: &str) -> Vec<String> {
    let list = workspace.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let words = list.map_or("", |(list, _)| list).split(',');
    words.map(|w| w.trim().trim_matches('"').to_owned()).filter(|w| !w.is_empty()).collect()
}

/// Licences, sources and forbidden dependencies, by `deny.toml`. Advisories need the network and
/// are left to `cargo deny check advisories`. What passes is noted in that file.
pub fn run(root: &Path, extent: Extent) -> Outcome {
    let mut o = Outcome::default();
    let Some(digest) = digest(root) else {
        println!("Cargo.lock, a manifest or {RULES} cannot be read");
        return one(false);
    };
    let noted = fs::read_to_string(root.join(RULES)).is_ok_and(|t| noted(&t) == Some(&*digest));
    if noted && extent != Extent::Full {
        println!("{RULES}: cargo-deny passed with these manifests and this Cargo.lock");
        return one(true);
    }
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
    let good = exec(root, &program, &args, Duration::from_secs(60));
    o.add(&one(good));
    if good && !noted {
        match note(&root.join(RULES), &digest) {
            Ok(()) => println!("noted in {RULES}: commit it"),
            Err(e) => println!("{RULES} cannot be written: {e}"),
        }
    }
    o
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_what_is_depended_on_is_checked_anew() {
        let dir = std::env::temp_dir().join(format!("xtask-deny-{}", std::process::id()));
        fs::create_dir_all(dir.join("crates/a")).unwrap();
        fs::create_dir_all(dir.join("tool")).unwrap();
        let files = [
            ("Cargo.toml", "[workspace]\nmembers = [\"crates/a\", \"tool\"]\n"),
            ("Cargo.lock", "version = 4\n"),
            (RULES, "[bans]\nwildcards = \"deny\"\n"),
            ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
            ("tool/Cargo.toml", "[package]\nname = \"tool\"\n"),
        ];
        files.iter().for_each(|(name, text)| fs::write(dir.join(name), text).unwrap());
        let first = digest(&dir).unwrap();
        let path = dir.join(RULES);
        note(&path, &first).unwrap();
        note(&path, &first).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!((noted(&text), text.lines().count()), (Some(&*first), 3), "{text}");
        assert_eq!(digest(&dir).unwrap(), first, "the note is none of the rules");
        for (name, text) in files {
            fs::write(dir.join(name), format!("{text}# more\n")).unwrap();
            assert_ne!(digest(&dir).unwrap(), first, "{name}");
            fs::write(dir.join(name), text).unwrap();
        }
        assert_eq!(digest(&dir).unwrap(), first);
        fs::remove_file(dir.join("tool/Cargo.toml")).unwrap();
        assert_eq!(digest(&dir), None, "a member without a manifest");
        fs::remove_dir_all(&dir).unwrap();
    }
}
