//! `cargo xtask drill`: random jobs, random harm, and a judge that knows only the harm.
//!
//! A case is a job of the `tilewire` command (threads or processes, 2 to 8 ranks) and one harm: a
//! rank killed, stopped or paused, the launcher killed, output that nobody reads, limits of the
//! system, a stranger's bytes, a damaged checkpoint, kills under `--max-restarts`. The driver (this
//! file and `act.rs`) does it and writes down what it sees; `xtask judge`, a process of its own,
//! gets the harm and what was seen, and nothing else (`judge.rs`). The numbers of a case follow
//! from seed and number: a failure prints the command that repeats it.

mod act;
mod case;
mod judge;
mod look;
mod steady;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::case::{Case, Devices};
use crate::python::driver::Driver;

/// The extent of a drill.
#[derive(clap::Args, Default)]
pub struct DrillArgs {
    /// Seconds after which no case begins any more.
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Seed of the cases. Default: a new one, which is printed.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Only this case of the seed.
    #[arg(long)]
    pub case: Option<u64>,
    /// On emulated devices, by all kinds of harm.
    #[arg(long)]
    pub emulated: bool,
    /// The same on one GPU, which the ranks share.
    #[arg(long, conflicts_with = "emulated")]
    pub gpu: bool,
    /// The program, as in `./tilewire`. Default: the release build of this tree.
    #[arg(long)]
    pub program: Option<PathBuf>,
    /// Only cases of this harm, as in `kill`.
    #[arg(long)]
    pub harm: Option<String>,
    /// Instead of cases one job of four ranks over all the seconds, of which one is killed every so
    /// many seconds; it writes a checkpoint about every 2 s, and the curve must be the whole one.
    #[arg(long, conflicts_with_all = ["emulated", "gpu", "case", "harm"],
          value_parser = clap::value_parser!(u64).range(1..))]
    pub every: Option<u64>,
}

/// Counts of a drill.
#[derive(Default)]
pub struct Tally {
    pub right: usize,
    pub wrong: usize,
    /// Cases whose harm came too late to do any: they show nothing.
    pub void: usize,
    /// Slowest end behind a harm, by its kind.
    slowest: BTreeMap<String, f64>,
    counts: BTreeMap<String, usize>,
}

/// Of a hundred cases so many may be void.
const MOST_VOID: usize = 2;
/// So often the harm of a case may come too late.
const TRIES: usize = 3;

/// Runs cases until the time is over; prints each that was not judged right, and a summary.
pub fn run(root: &Path, args: &DrillArgs) -> Tally {
    // Jobs run in folders of their own.
    let given = args.program.as_ref().map(|p| p.canonicalize().unwrap_or_else(|_| p.clone()));
    let program = given.unwrap_or_else(|| root.join("target/release/tilewire"));
    let mut tally = Tally::default();
    if !program.exists() {
        println!("{}: build it first (cargo build --release)", program.display());
        tally.wrong = 1;
        return tally;
    }
    let driver = if args.emulated { Driver::emulated() } else { None };
    if args.emulated && driver.is_none() {
        println!("no g++: nothing runs on emulated devices");
        tally.wrong = 1;
        return tally;
    }
    let seed = args.seed.unwrap_or_else(new_seed);
    let devices = match (args.emulated, args.gpu) {
        (true, _) => Devices::Emulated,
        (_, true) => Devices::Gpu,
        _ => Devices::None,
    };
    println!("drill of {} s, seed {seed}{}", args.seconds, devices.flag());
    let start = Instant::now();
    for number in args.case.map_or(0..u64::MAX, |c| c..c + 1) {
        if start.elapsed() > Duration::from_secs(args.seconds) {
            break;
        }
        let case = match args.every {
            Some(period) => Case::steady(seed, args.seconds, period),
            None => Case::new(seed, number, devices),
        };
        if args.harm.as_ref().is_some_and(|h| case.harm() != *h) {
            continue;
        }
        let began = Instant::now();
        let run = || act::run((&program, driver.as_ref()), &case);
        let (seen, said) = tried(run, |seen| verdict(&case.harm, seen));
        tally.count(&case, &seen, &said, began.elapsed());
        if args.every.is_some() {
            break;
        }
    }
    tally.print();
    tally
}

/// Runs a case and judges it, up to [`TRIES`] times: a harm that came too late, which is void, is
/// done again.
fn tried(run: impl Fn() -> Value, judge: impl Fn(&Value) -> String) -> (Value, String) {
    let mut tries = 0;
    loop {
        let seen = run();
        let said = judge(&seen);
        tries += 1;
        if said != "void" || tries == TRIES {
            return (seen, said);
        }
    }
}

fn new_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |d| d.as_nanos() as u64) % 1_000_000_000
}

/// The verdict of a judge, who is a process of its own.
fn verdict(harm: &Value, seen: &Value) -> String {
    let judge = || -> std::io::Result<String> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("judge")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        if let Some(mut pipe) = child.stdin.take() {
            pipe.write_all(
                serde_json::json!({ "harm": harm, "seen": seen }).to_string().as_bytes(),
            )?;
        }
        let said = child.wait_with_output()?;
        Ok(String::from_utf8_lossy(&said.stdout).trim().to_owned())
    };
    judge().unwrap_or_else(|e| format!("wrong: the judge cannot be asked: {e}"))
}

/// `xtask judge`: reads a harm and what was seen, prints `right`, `void` or `wrong: why`.
pub fn judge() {
    let mut text = String::new();
    let read = std::io::stdin().read_to_string(&mut text);
    let both: Option<Value> = read.ok().and_then(|_| serde_json::from_str(&text).ok());
    match both {
        Some(v) => println!("{}", judge::judge(&v["harm"], &v["seen"])),
        None => println!("wrong: the judge was given nothing"),
    }
}

impl Tally {
    fn count(&mut self, case: &Case, seen: &Value, verdict: &str, took: Duration) {
        let kind = case.harm();
        *self.counts.entry(kind.clone()).or_default() += 1;
        match verdict {
            "right" => {
                self.right += 1;
                let slowest = self.slowest.entry(kind).or_default();
                *slowest = slowest.max(seen["seconds"].as_f64().unwrap_or(0.0));
            }
            "void" => self.void += 1,
            why => {
                self.wrong += 1;
                println!("{why}\n  harm {}\n  job {:?}", case.harm, case.words);
                for what in [
                    "code", "signal", "seconds", "left", "shm", "temp", "sockets", "files", "fds",
                    "differs",
                ] {
                    println!("  {what}: {}", seen[what]);
                }
                let text = seen["err"].as_str().unwrap_or_default();
                text.lines().rev().take(25).for_each(|l| println!("    {l}"));
                println!("  again: cargo xtask drill --seed {} {}", case.seed, case.again());
            }
        }
        if took > Duration::from_secs(30) {
            println!("case {} took {:.0} s: {}", case.number, took.as_secs_f64(), case.harm);
        }
    }

    fn print(&self) {
        for (kind, num) in &self.counts {
            let slowest = self.slowest.get(kind).copied().unwrap_or(0.0);
            println!("  {kind:<10} {num:>4} cases, slowest end {slowest:.2} s");
        }
        let all = self.right + self.wrong + self.void;
        println!("{all} cases: {} right, {} wrong, {} void", self.right, self.wrong, self.void);
    }

    /// Problems of the drill as a whole.
    pub fn problems(&self) -> Vec<String> {
        let all = self.right + self.wrong + self.void;
        let mut out = Vec::new();
        if self.wrong > 0 {
            out.push(format!("{} of {all} verdicts of the drill are wrong", self.wrong));
        }
        if 100 * self.void > MOST_VOID * all {
            out.push(format!("{} of {all} cases of the drill are void", self.void));
        }
        if self.right == 0 {
            out.push("the drill has shown nothing".to_owned());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_void_case_is_tried_again_and_a_wrong_one_is_not() {
        use std::cell::Cell;
        let of = |verdicts: &'static [&'static str]| {
            let at = Cell::new(0);
            let run = || Value::from(at.replace(at.get() + 1));
            let judge = |seen: &Value| {
                let i = seen.as_u64().and_then(|i| usize::try_from(i).ok());
                i.and_then(|i| verdicts.get(i)).copied().unwrap_or("none").to_owned()
            };
            (tried(run, judge).1, at.get())
        };
        assert_eq!(of(&["right"]), ("right".to_owned(), 1));
        assert_eq!(of(&["void", "void", "right"]), ("right".to_owned(), 3));
        assert_eq!(of(&["void", "wrong: x", "right"]), ("wrong: x".to_owned(), 2));
        assert_eq!(of(&["void", "void", "void", "right"]), ("void".to_owned(), 3));
    }

    #[test]
    fn wrong_verdicts_many_void_cases_and_nothing_shown_are_problems() {
        let tally = |right, wrong, void| Tally { right, wrong, void, ..Tally::default() };
        assert!(tally(98, 0, 2).problems().is_empty());
        assert!(tally(97, 0, 3).problems()[0].contains("3 of 100 cases of the drill are void"));
        assert!(tally(20, 0, 1).problems()[0].contains("void"), "in a short drill, too");
        assert!(tally(99, 1, 0).problems()[0].contains("1 of 100 verdicts"));
        assert!(tally(0, 0, 0).problems()[0].contains("shown nothing"));
    }
}
