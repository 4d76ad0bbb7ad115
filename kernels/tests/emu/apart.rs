//! A process for each broken text: what it overwrites beside its buffers is its own.
//!
//! Kernels are C++ here, and nothing stops a broken one that stores through a wrong index into
//! memory of the harness or of other tests. So the process of a test starts itself anew with the
//! name of the test and of one mutant. The child runs the test up to its call of
//! `planted::all_are_killed`, which tries that mutant alone, reports on stdout and ends the
//! process. Texts that are not broken are compiled once for all of them (`compile.rs`).

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// The mutant of a child: unit, group and number.
const MUTANT: &str = "TW_EMU_MUTANT";
/// Kernels that the scenario has asked for in other children: `unit kernel`, one to a line.
const ASKED: &str = "TW_EMU_ASKED";
/// What lines of a child begin with that are for its parent.
const MARK: &str = "mutant: ";
/// What a child says once the broken text was compiled.
const LOADED: &str = "loaded";
/// No mutant takes longer: a run ends at its own deadline, after three minutes.
const LIMIT: Duration = Duration::from_secs(400);

thread_local! {
    static TEST: Cell<&'static str> = const { Cell::new("") };
}

/// Notes the test that this thread runs from now on.
pub fn begin(test: &'static str) {
    TEST.set(test);
}

/// The test that this thread runs.
pub fn test() -> &'static str {
    TEST.get()
}

/// A mutant: the test that tries it, the unit and group it is of, and its number there.
pub type Which<'a> = (&'static str, (&'a str, &'a str), usize);

/// What a scenario said about a mutant: how it was noticed, or why that shows nothing.
pub type Verdict = Result<String, String>;

/// The number of the mutant that this process is for, if it is one of `of`; none in a process that
/// tries all.
pub fn mine(of: (&str, &str)) -> Option<usize> {
    let mutant = env::var(MUTANT).ok()?;
    let number = mutant.strip_prefix(&format!("{} {} ", of.0, of.1))?;
    Some(number.parse().expect("the number of a mutant"))
}

/// True in a process that is for one mutant.
pub fn is_child() -> bool {
    env::var_os(MUTANT).is_some()
}

/// Kernels that scenarios have asked for, by scenario and unit.
type Asked = BTreeMap<(String, String), BTreeSet<String>>;
static KNOWN: Mutex<Asked> = Mutex::new(BTreeMap::new());

/// The kernels of `unit` that the scenario is known to ask for, `name` now. None if it is the first
/// to ask for some: then all of them are compiled.
pub fn asked(scenario: &str, unit: &str, name: &str) -> Option<BTreeSet<String>> {
    let mut known = KNOWN.lock().unwrap();
    let all = known.entry((scenario.to_owned(), unit.to_owned())).or_default();
    let first = all.is_empty();
    all.insert(name.to_owned());
    (!first).then(|| all.clone())
}

fn lines(scenario: &str) -> String {
    let known = KNOWN.lock().unwrap();
    let of = known.iter().filter(|((s, _), _)| s == scenario);
    of.flat_map(|((_, unit), all)| all.iter().map(move |k| format!("{unit} {k}\n"))).collect()
}

fn learn(scenario: &str, lines: &str) {
    for (unit, kernel) in lines.lines().filter_map(|l| l.split_once(' ')) {
        asked(scenario, unit, kernel);
    }
}

/// Tries the mutant of this process by `kill`, reports, and ends the process.
pub fn report(scenario: &str, kill: impl FnOnce(&mut dyn FnMut()) -> Verdict) -> ! {
    learn(scenario, &env::var(ASKED).unwrap_or_default());
    let verdict = kill(&mut || say(LOADED, ""));
    lines(scenario).lines().for_each(|asked| say("asked", asked));
    let (word, text) = match &verdict {
        Ok(how) => ("killed", how),
        Err(why) => ("not", why),
    };
    // One line.
    let text: String = text.chars().take(4000).collect::<String>().replace('\n', " | ");
    say(word, &text);
    // Nothing that the mutant may have overwritten is dropped.
    std::process::exit(0);
}

#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn say(word: &str, text: &str) {
    println!("{MARK}{word} {text}");
}

/// Tries mutant `which` in a process of its own.
pub fn tried(which: Which<'_>, scenario: &str) -> Verdict {
    let begun = Instant::now();
    let (test, (unit, group), number) = which;
    let mut child = Command::new(env::current_exe().expect("this program"))
        .arg(test)
        .env(MUTANT, format!("{unit} {group} {number}"))
        .env(ASKED, lines(scenario))
        .env(crate::compile::DIR, crate::compile::dir())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("NO PROCESS: {e}"))?;
    let said = ended(&mut child)?;
    let status = child.wait().map_err(|e| format!("NO STATUS: {e}"))?;
    let mut loaded = false;
    // What it says before it ends counts, whatever ends it.
    for line in said.lines().filter_map(|l| l.strip_prefix(MARK)) {
        match line.split_once(' ') {
            Some((LOADED, _)) => loaded = true,
            Some(("asked", kernel)) => learn(scenario, kernel),
            Some(("killed", how)) => return Ok(how.to_owned()),
            Some(("not", why)) => return Err(why.to_owned()),
            _ => return Err(format!("NO VERDICT: {line}")),
        }
    }
    match status.signal() {
        // Signals of its own, not of whoever ends processes.
        Some(signal @ (4 | 6 | 7 | 8 | 11)) if loaded => {
            Ok(format!("{:>5.2} s ends by signal {signal}", begun.elapsed().as_secs_f64()))
        }
        _ => Err(format!("NO VERDICT: {status}, {said}")),
    }
}

/// What a child says until it ends; an error if it does not.
fn ended(child: &mut Child) -> Result<String, String> {
    let mut out = child.stdout.take().expect("a pipe");
    let reader = thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    let until = Instant::now() + LIMIT;
    while !reader.is_finished() {
        if Instant::now() > until {
            child.kill().ok();
            child.wait().ok();
            return Err(format!("NO END after {} s", LIMIT.as_secs()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    reader.join().expect("a reader").map_err(|e| format!("NOT READ: {e}"))
}
