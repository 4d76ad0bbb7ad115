//! `cargo xtask fuzz`: the targets of all crates for longer than in the tests.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::stages::OFF;
use crate::suites::{self, Suite};

/// Time of a target in ms: bolero's own variable.
const TIME: &str = "BOLERO_RANDOM_TEST_TIME_MS";

/// The beginning of the name of each target's test.
const PREFIX: &str = "fuzz_";

#[derive(clap::Args)]
pub struct FuzzArgs {
    /// Time for each target; as many run at once as there are processors.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Only targets whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
}

/// Packages with targets: they take the feature `fuzz` of `tilewire-testing`.
fn packages(root: &Path) -> Vec<String> {
    let crates = std::fs::read_dir(root.join("crates")).into_iter().flatten().flatten();
    let named = crates.filter_map(|e| {
        let manifest = std::fs::read_to_string(e.path().join("Cargo.toml")).ok()?;
        let mut lines = manifest.lines();
        let has = lines.any(|l| l.starts_with("tilewire-testing") && l.contains("\"fuzz\""));
        has.then(|| format!("tilewire-{}", e.file_name().display()))
    });
    let mut all: Vec<_> = named.collect();
    all.sort();
    all
}

/// The targets in the list of tests of a binary: whole names of tests.
fn targets(list: &str, only: &str) -> Vec<String> {
    let tests = list.lines().filter_map(|l| l.strip_suffix(": test"));
    let is_target = |t: &&str| {
        let name = t.rsplit("::").next().unwrap_or_default();
        name.strip_prefix(PREFIX).is_some_and(|name| name.contains(only))
    };
    tests.filter(is_target).map(str::to_owned).collect()
}

/// Lines of `name<tab>inputs<tab>accepted`, as a table.
fn table(counts: &str) -> String {
    let mut rows: Vec<String> = counts
        .lines()
        .map(|l| {
            let mut f = l.split('\t');
            let mut next = || f.next().unwrap_or_default();
            format!("{:<20} {:>12} inputs, {:>12} accepted", next(), next(), next())
        })
        .collect();
    rows.sort();
    rows.join("\n")
}

/// Runs the targets of one binary; returns their number, and what is wrong.
fn run_one(suite: &Suite, args: &FuzzArgs, counts: &Path) -> Result<usize, String> {
    let start = |words: &[&str]| {
        let mut command = Command::new(&suite.exe);
        command.args(words).current_dir(&suite.dir).envs(OFF).stdin(Stdio::null());
        command.env("RUST_BACKTRACE", "0").env(TIME, (1000 * args.seconds).to_string());
        command.env(tilewire_testing::FUZZ_COUNTS, counts);
        command.output().map_err(|e| format!("cannot start {}: {e}", suite.exe.display()))
    };
    let list = start(&["--list", PREFIX])?;
    let tests = targets(&String::from_utf8_lossy(&list.stdout), &args.only);
    if tests.is_empty() {
        return Ok(0);
    }
    println!("{}: {}", suite.name, tests.join(" "));
    let words: Vec<&str> = ["--exact"].into_iter().chain(tests.iter().map(|t| &**t)).collect();
    let out = start(&words)?;
    if out.status.success() {
        return Ok(tests.len());
    }
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    println!("{text}");
    Err(format!("{}: a target has failed, or the process ended ({})", suite.name, out.status))
}

/// Runs all targets, prints the number of inputs of each; what is wrong, one line each.
pub fn run(root: &Path, args: &FuzzArgs) -> Vec<String> {
    let packages = packages(root);
    let words = packages.iter().flat_map(|p| ["-p", p]).chain(["--lib"]).collect::<Vec<_>>();
    let Some(suites) = suites::built(root, &words) else {
        return vec!["the tests cannot be built".to_owned()];
    };
    let counts = root.join(format!("target/fuzz-counts-{}", std::process::id()));
    std::fs::remove_file(&counts).ok();
    let (mut num, mut problems) = (0, Vec::new());
    for suite in &suites {
        match run_one(suite, args, &counts) {
            Ok(n) => num += n,
            Err(why) => problems.push(why),
        }
    }
    let text = std::fs::read_to_string(&counts).unwrap_or_default();
    std::fs::remove_file(&counts).ok();
    println!("{}", table(&text));
    if num == 0 && problems.is_empty() {
        problems.push(format!("no target has a name with {:?}", args.only));
    }
    // Each writes a line at its end.
    if problems.is_empty() && text.lines().count() != num {
        problems.push(format!("{} of {num} targets ran to their end", text.lines().count()));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_tests_by_their_last_name() {
        let list = "a::fuzz_card: test\nfuzz_x::other: test\nb::fuzz_torch_reply: test\n3 tests\n";
        assert_eq!(targets(list, ""), ["a::fuzz_card", "b::fuzz_torch_reply"]);
        assert_eq!(targets(list, "torch"), ["b::fuzz_torch_reply"]);
        assert!(targets(list, "fuzz").is_empty(), "the prefix is not of the name");
        let t = table("b\t10\t2\na\t7\t1\n");
        assert!(t.starts_with('a') && t.lines().nth(1).unwrap().contains(" 10 inputs"), "{t}");
    }

    /// A use of `fuzz!` in a crate that `packages` leaves out would run in the tests alone.
    #[test]
    fn all_crates_with_targets_are_found() {
        let found = packages(&crate::root());
        assert_eq!(found, ["tilewire-boot", "tilewire-cli", "tilewire-device", "tilewire-nn"]);
    }
}
