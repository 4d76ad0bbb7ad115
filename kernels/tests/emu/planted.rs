//! Texts that are broken on purpose: every mutant must fail its scenario.

use std::collections::HashMap;
use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::Deserialize;

use crate::host::Lib;
use crate::run::words;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![every_group_of_mutants_has_a_test];

/// Where the kernels are.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

/// How a text becomes a library.
type Load = fn(String) -> &'static Lib;

/// A scenario by its name: it must pass with the text as it is, and fail with its mutants.
pub type Scenario = (&'static str, fn(&'static Lib));

/// Scenarios by their names.
#[macro_export]
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), $name as fn(&'static $crate::host::Lib))),*]
    };
}

/// A text that is broken on purpose, as a file `*.mutants.toml` beside the kernel says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Planted {
    /// What is wrong.
    what: String,
    /// Which scenario must fail.
    scenario: String,
    /// What stands once in the text.
    from: String,
    /// What takes its place.
    to: String,
}

type Groups = HashMap<String, Vec<Planted>>;

/// The groups of mutants of `unit`, a path below `kernels/src` without its ending.
fn groups(unit: &str) -> Groups {
    let path = Path::new(ROOT).join(format!("{unit}.mutants.toml"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    toml::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What `f` panics with.
fn failure(f: impl FnOnce()) -> Option<String> {
    let payload = panic::catch_unwind(AssertUnwindSafe(f)).err()?;
    Some(words(&*payload).split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What the scenario says about a mutant. An error if it says nothing, or not because of it.
fn kill(scenario: fn(&'static Lib), broken: String, load: Load) -> Result<String, String> {
    let mut lib = None;
    if let Some(why) = failure(|| lib = Some(load(broken))) {
        return Err(format!("DOES NOT COMPILE: {why}"));
    }
    let lib = lib.ok_or("was not loaded")?;
    failure(|| scenario(lib)).ok_or_else(|| "SURVIVED".to_owned())
}

/// Compiles and runs every mutant of `text` that group `of.1` of file `of.0` has, each in the
/// scenario that it names. The scenarios must be tests of their own, which pass with the text as it
/// is, and each must be named.
#[expect(clippy::print_stdout, reason = "the table is what CI shows")]
pub fn all_are_killed(text: &str, load: Load, of: (&str, &str), scenarios: &[Scenario]) {
    let mutants = groups(of.0).remove(of.1).unwrap_or_else(|| panic!("{of:?}: no such group"));
    let find = |m: &Planted| scenarios.iter().find(|(name, _)| *name == m.scenario);
    for m in &mutants {
        assert_eq!(text.matches(&m.from).count(), 1, "{}: its place in the text", m.what);
        assert!(find(m).is_some(), "{}: no scenario {}", m.what, m.scenario);
    }
    for (name, _) in scenarios {
        assert!(mutants.iter().any(|m| m.scenario == *name), "{name}: no mutant needs it");
    }
    let (next, table) = (AtomicUsize::new(0), Mutex::new(vec![None; mutants.len()]));
    let work = || {
        while let Some((i, m)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            mutants.get(i).map(|m| (i, m))
        } {
            let how = find(m).map(|(_, s)| kill(*s, text.replace(&m.from, &m.to), load));
            table.lock().unwrap()[i] = how;
        }
    };
    let num = thread::available_parallelism().map_or(1, |n| n.get().min(8));
    thread::scope(|s| (0..num).for_each(|_| drop(s.spawn(work))));
    let table: Vec<_> = table.into_inner().unwrap().into_iter().flatten().collect();
    for (m, how) in mutants.iter().zip(&table) {
        let line = how.as_ref().map_or_else(String::clone, |l| l.chars().take(100).collect());
        println!("{:<40} {line}", m.what);
    }
    let killed = table.iter().flatten().count();
    println!("{killed} of {} mutants killed", mutants.len());
    assert_eq!(killed, mutants.len(), "a mutant survived: see the table");
}

/// A group that no test runs would break nothing when its kernel changes.
fn every_group_of_mutants_has_a_test() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emu");
    let mut all = String::new();
    for entry in sources.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "rs") {
            all += &fs::read_to_string(path).unwrap();
        }
    }
    let mut found = 0;
    for folder in Path::new(ROOT).read_dir().unwrap().map(|e| e.unwrap().path()) {
        for path in folder.read_dir().into_iter().flatten().map(|e| e.unwrap().path()) {
            let Some(unit) = path.to_str().unwrap().strip_suffix(".mutants.toml") else { continue };
            let unit = unit.strip_prefix(ROOT).unwrap().trim_start_matches('/');
            for (group, mutants) in groups(unit) {
                assert!(all.contains(&format!("(\"{unit}\", \"{group}\")")), "{unit}: {group}");
                found += mutants.len();
            }
        }
    }
    assert!(found > 600, "{found} mutants");
}
