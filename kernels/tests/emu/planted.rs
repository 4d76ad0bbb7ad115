//! Texts that are broken on purpose: every mutant must fail its scenario.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::host::Lib;
use crate::run::words;

type Scenario = fn(&'static Lib);

/// What is wrong, the text, what stands in its place, and the scenario that must fail.
pub struct Planted(pub &'static str, pub &'static str, pub &'static str, pub Scenario);

/// What `f` panics with.
fn failure(f: impl FnOnce()) -> Option<String> {
    let payload = panic::catch_unwind(AssertUnwindSafe(f)).err()?;
    Some(words(&*payload).split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What the scenario says about a mutant. An error if it says nothing, or not because of it.
fn kill(m: &Planted, text: &str, load: fn(String) -> &'static Lib) -> Result<String, String> {
    let mut lib = None;
    if let Some(why) = failure(|| lib = Some(load(text.replace(m.1, m.2)))) {
        return Err(format!("DOES NOT COMPILE: {why}"));
    }
    let lib = lib.ok_or("was not loaded")?;
    failure(|| (m.3)(lib)).ok_or_else(|| "SURVIVED".to_owned())
}

/// Compiles and runs every mutant of `text`. The scenarios must be tests of their own, which pass
/// with the text as it is.
#[expect(clippy::print_stdout, reason = "the table is what CI shows")]
pub fn all_are_killed(text: &str, load: fn(String) -> &'static Lib, mutants: &[Planted]) {
    for m in mutants {
        assert_eq!(text.matches(m.1).count(), 1, "{}: its place in the text", m.0);
    }
    let (next, table) = (AtomicUsize::new(0), Mutex::new(vec![None; mutants.len()]));
    let work = || {
        while let Some((i, m)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            mutants.get(i).map(|m| (i, m))
        } {
            let how = kill(m, text, load);
            table.lock().unwrap()[i] = Some(how);
        }
    };
    let num = thread::available_parallelism().map_or(1, |n| n.get().min(8));
    thread::scope(|s| (0..num).for_each(|_| drop(s.spawn(work))));
    let table: Vec<_> = table.into_inner().unwrap().into_iter().flatten().collect();
    for (m, how) in mutants.iter().zip(&table) {
        let line = how.as_ref().map_or_else(String::clone, |l| l.chars().take(100).collect());
        println!("{:<40} {line}", m.0);
    }
    let killed = table.iter().flatten().count();
    println!("{killed} of {} mutants killed", mutants.len());
    assert_eq!(killed, mutants.len(), "a mutant survived: see the table");
}
