//! Texts that are broken on purpose: every mutant must fail its scenario.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::Instant;

use serde::Deserialize;

use crate::apart;
use crate::compile::{Refused, Unit};
use crate::host::{Lib, RUNTIME};
use crate::run::words;
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    every_group_of_mutants_has_a_test,
    every_mutant_is_in_a_part,
    what_the_compiler_refuses_is_not_killed,
];

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

/// The broken text that this thread tries.
struct Attempt {
    scenario: &'static str,
    text: String,
    /// What was loaded of it.
    libs: Vec<(Unit, &'static Lib)>,
}

thread_local! {
    static ATTEMPT: RefCell<Option<Attempt>> = const { RefCell::new(None) };
}

/// True if `text` is the broken one that this thread tries; more may stand behind that.
pub fn is_broken(text: &str) -> bool {
    ATTEMPT.with_borrow(|a| a.as_ref().is_some_and(|a| text.starts_with(&a.text)))
}

/// A library of the broken text: that which was made with the same definitions, if there is one.
pub fn loaded(unit: &Unit, new: impl FnOnce() -> &'static Lib) -> &'static Lib {
    ATTEMPT.with_borrow_mut(|a| {
        let libs = &mut a.as_mut().expect("a broken text").libs;
        if let Some((_, lib)) = libs.iter().find(|(u, _)| u == unit) {
            return *lib;
        }
        libs.push((unit.clone(), new()));
        libs[libs.len() - 1].1
    })
}

/// The kernels of `unit` that the scenario of this thread has asked for so far, `name` now. All of
/// them, if it is the first time, or no broken text is tried.
pub fn asked(unit: &Unit, name: &str) -> Vec<&'static str> {
    let scenario = ATTEMPT.with_borrow(|a| a.as_ref().map(|a| a.scenario));
    let Some(scenario) = scenario.filter(|_| is_broken(&unit.text)) else {
        return unit.kernels.clone();
    };
    match apart::asked(scenario, unit.name, name) {
        None => unit.kernels.clone(),
        Some(known) => unit.kernels.iter().copied().filter(|k| known.contains(*k)).collect(),
    }
}

/// What the scenario says about a mutant. An error if it says nothing, or not because of it. Calls
/// `at_work` when the broken text is loaded.
fn kill(
    scenario: &Scenario,
    broken: String,
    load: Load,
    at_work: &mut dyn FnMut(),
) -> Result<String, String> {
    let (begun, text) = (Instant::now(), broken.clone());
    ATTEMPT.set(Some(Attempt { scenario: scenario.0, text, libs: Vec::new() }));
    let mut loaded = false;
    let ended = panic::catch_unwind(AssertUnwindSafe(|| {
        let lib = load(broken);
        loaded = true;
        at_work();
        (scenario.1)(lib);
    }));
    ATTEMPT.set(None);
    let payload = ended.err().ok_or("SURVIVED")?;
    // A library that cannot be made or used, here or in the scenario, shows nothing.
    if let Some(Refused(why)) = payload.downcast_ref() {
        return Err(format!("DOES NOT COMPILE: {why}"));
    }
    if !loaded {
        return Err(format!("WAS NOT LOADED: {}", words(&*payload)));
    }
    let why: Vec<_> = words(&*payload).split_whitespace().map(str::to_owned).collect();
    Ok(format!("{:>5.2} s {}", begun.elapsed().as_secs_f64(), why.join(" ")))
}

/// The part of each group that is tried in the usual extent: one mutant of so many. All of them
/// take ten minutes of both processors, most of it in the compiler.
const PART: usize = 6;

/// The mutants to try: all of them for `cargo xtask test --full`, otherwise every sixth and at
/// least one of each scenario. The text of the kernel decides where the count begins: a change of
/// the kernel tries another part than the change before it, and every run of one text the same
/// part.
fn to_try(text: &str, mutants: &[Planted]) -> Vec<usize> {
    if std::env::var_os("TW_FULL").is_some() {
        return (0..mutants.len()).collect();
    }
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    a_part(mutants, hasher.finish() as usize)
}

fn a_part(mutants: &[Planted], begin: usize) -> Vec<usize> {
    let mut of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, m) in mutants.iter().enumerate() {
        of.entry(&m.scenario).or_default().push(i);
    }
    let mut all: Vec<usize> = (begin % PART..mutants.len()).step_by(PART).collect();
    for there in of.values().filter(|t| t.iter().all(|i| i % PART != begin % PART)) {
        all.push(there[begin / PART % there.len()]);
    }
    all.sort_unstable();
    all
}

/// Compiles and runs mutants of `text` that group `of.1` of file `of.0` has ([`to_try`]), each in
/// the scenario that it names. Each mutant must have its place in the text, the scenarios must be
/// tests of their own, which pass with the text as it is, and each must be named.
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
    if let Some(m) = apart::mine(of).map(|i| &mutants[i]) {
        let broken = text.replace(&m.from, &m.to);
        apart::report(&m.scenario, |at_work| {
            kill(find(m).expect("its scenario"), broken, load, at_work)
        });
    }
    if apart::is_child() {
        return;
    }
    let (tried, test) = (to_try(text, &mutants), apart::test());
    // Once for all children.
    LazyLock::force(&RUNTIME);
    let (next, table) = (AtomicUsize::new(0), Mutex::new(vec![None; tried.len()]));
    let work = || {
        while let Some((at, m)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            tried.get(at).map(|i| (at, *i))
        } {
            let how = apart::tried((test, of, m), &mutants[m].scenario);
            table.lock().unwrap()[at] = Some(how);
        }
    };
    let num = thread::available_parallelism().map_or(1, |n| n.get().min(8));
    thread::scope(|s| (0..num).for_each(|_| drop(s.spawn(work))));
    let table: Vec<_> = table.into_inner().unwrap().into_iter().flatten().collect();
    for (i, how) in tried.iter().zip(&table) {
        let line = how.as_ref().map_or_else(String::clone, |l| l.chars().take(100).collect());
        println!("{:<40} {line}", mutants[*i].what);
    }
    let killed = table.iter().flatten().count();
    println!("{killed} of {} mutants killed; there are {}", tried.len(), mutants.len());
    assert_eq!(killed, tried.len(), "a mutant survived: see the table");
}

/// All parts together are all mutants, and each has one of every scenario.
fn every_mutant_is_in_a_part() {
    let mut tried = 0;
    for_each_group(|unit, group, mutants| {
        let of = |part: &[usize]| -> BTreeSet<String> {
            part.iter().map(|i| mutants[*i].scenario.clone()).collect()
        };
        let all: Vec<usize> = (0..mutants.len()).collect();
        let parts: Vec<_> = (0..PART).map(|begin| a_part(mutants, begin)).collect();
        let together: BTreeSet<usize> = parts.iter().flatten().copied().collect();
        assert!(together.into_iter().eq(all.iter().copied()), "{unit}: {group}");
        for part in &parts {
            assert_eq!(of(part), of(&all), "{unit}: {group}");
            assert!(part.windows(2).all(|w| w[0] < w[1]), "{unit}: {group}: one is tried twice");
        }
        tried += parts[0].len();
    });
    assert!(tried > 180, "{tried} mutants in a part");
}

/// Libraries are made within scenarios: one that cannot be made must not look like a mutant that
/// was found.
fn what_the_compiler_refuses_is_not_killed() {
    let load: Load = |text| {
        let (name, kernels) = ("planted/refused", vec!["t_one", "t_two"]);
        RUNTIME.load(&Unit { name, text, defines: Vec::new(), kernels, smem: 0 })
    };
    let asks: Scenario = ("asks", |lib| drop((lib.kernel("t_one"), lib.kernel("t_two"))));
    let how = |text: &str| kill(&asks, text.to_owned(), load, &mut || ());
    let both = "extern \"C\" __global__ void t_one() {}\nextern \"C\" __global__ void t_two() {}\n";
    assert_eq!(how(both), Err("SURVIVED".to_owned()));
    for refused in [both.replace("{}", "{ no }"), both.replace("t_two", "t_three")] {
        let why = how(&refused).unwrap_err();
        assert!(why.starts_with("DOES NOT COMPILE"), "{why}");
    }
    let stops: Scenario = ("stops", |lib| panic!("{}", lib.text()));
    assert!(kill(&stops, both.to_owned(), load, &mut || ()).unwrap().contains("t_two"));
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
    for_each_group(|unit, group, mutants| {
        assert!(all.contains(&format!("(\"{unit}\", \"{group}\")")), "{unit}: {group}");
        found += mutants.len();
    });
    assert!(found > 600, "{found} mutants");
}

/// Calls `f` with each group of each unit: their names and the group's mutants.
fn for_each_group(mut f: impl FnMut(&str, &str, &[Planted])) {
    for folder in Path::new(ROOT).read_dir().unwrap().map(|e| e.unwrap().path()) {
        for path in folder.read_dir().into_iter().flatten().map(|e| e.unwrap().path()) {
            let Some(unit) = path.to_str().unwrap().strip_suffix(".mutants.toml") else { continue };
            let unit = unit.strip_prefix(ROOT).unwrap().trim_start_matches('/');
            groups(unit).iter().for_each(|(group, mutants)| f(unit, group, mutants));
        }
    }
}
