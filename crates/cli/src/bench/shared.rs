//! `tilewire bench shared`: ranks that share one device, timed by one program, or by two in turn.
//!
//! Each round starts the programs as children, `PROGRAM bench --json ...`, so that a program of
//! before needs nothing but `bench`. Two ranks are threads of the child; more are processes of its
//! launcher. With two programs every second round begins with the other one, so that what drifts
//! meets both. A case is compared by the median of its rounds; before against before is how far the
//! medians of the program of before lie apart, and what is slower by no more than that is no
//! change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tilewire::prelude::*;

use crate::args::SharedArgs;
use crate::rows::ROW_VERSION;
use crate::{complain, say, worlds};

/// The operations that are timed if `--op` names nothing.
const OPS: &str = "all_gather,reduce_scatter,all_reduce,all_to_all,\
                   ep_dispatch,ep_combine,ep_dispatch_bwd,ep_combine_bwd,cp_attention";
/// Flags of `bench` for sizes that take milliseconds where ranks share a device, and how the
/// operations begin that read them.
const ON_DEVICES: [(&[&str], &str); 4] = [
    (&[""], "--dtype bf16 --iters 50 --warmup 5"),
    (&["all_", "reduce_scatter"], "--bytes 65536,8388608"),
    (&["ep_", "permute"], "--tokens 512 --hidden 1024 --experts 16 --top-k 4 --align 16"),
    (&["cp_attention"], "--m 1024"),
];
const ON_HOST: [(&[&str], &str); 4] = [
    (&[""], "--iters 30 --warmup 3"),
    (&["all_", "reduce_scatter"], "--n 256"),
    (&["ep_", "permute"], "--tokens 128 --hidden 256"),
    (&["all_", "reduce_scatter", "cp_attention"], "--m 512"),
];
/// The slowdown that a case may have, whatever the noise.
const ALLOWED: f64 = 0.02;

/// The key that tells a case from others.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Case {
    op: String,
    backend: String,
    device: String,
    dtype: String,
    ranks: u64,
    shape: String,
}

impl Case {
    fn of(row: &Value) -> Result<Self> {
        let word = |key: &str| match row[key].as_str() {
            Some(word) => Ok(word.to_owned()),
            None => Err(Error::new(ErrorKind::Corrupt, "a row of a benchmark lacks a field")
                .expected(key)
                .seen(row)),
        };
        let ranks = row["ranks"].as_u64().unwrap_or_default();
        Ok(Self {
            op: word("op")?,
            backend: word("backend")?,
            device: word("device")?,
            dtype: word("dtype")?,
            ranks,
            shape: word("shape")?,
        })
    }
}

/// Medians of rounds, in microseconds, of each program.
type Times = BTreeMap<Case, [Vec<f64>; 2]>;

/// The middle one; of an even number the mean of the two in the middle.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
    let n = sorted.len();
    if n % 2 == 1 { at(n / 2) } else { (at((n / 2).wrapping_sub(1)) + at(n / 2)) / 2.0 }
}

/// Returns how far samples lie apart: the largest over the smallest, less one.
fn apart(samples: &[f64]) -> f64 {
    let smallest = samples.iter().copied().fold(f64::INFINITY, f64::min);
    samples.iter().copied().fold(0.0, f64::max) / smallest - 1.0
}

/// A case of two programs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Compared {
    ratio: f64,
    before_against_before: f64,
    slower: bool,
}

impl Compared {
    fn of(before: &[f64], after: &[f64]) -> Self {
        let (ratio, noise) = (median(after) / median(before), apart(before));
        // A ratio that is no number is no good news.
        let slower = ratio.is_nan() || ratio - 1.0 > noise.max(ALLOWED);
        Self { ratio, before_against_before: noise, slower }
    }
}

/// Runs the command; returns the exit code: 1 if a case is slower than allowed.
///
/// # Errors
/// Bad arguments; a program that cannot be started, fails, or has wrong results.
pub fn run(args: &SharedArgs) -> Result<i32> {
    if args.rounds == 0 || args.ranks.iter().any(|&n| n < 2) {
        return Err(Error::invalid(
            "`bench shared` needs at least one round of at least two ranks",
        )
        .expected("--rounds of at least 1, --ranks of at least 2")
        .seen(format_args!("--rounds {} --ranks {:?}", args.rounds, args.ranks)));
    }
    let me =
        std::env::current_exe().map_err(|e| Error::io("finding the file of this program", e))?;
    let programs: Vec<PathBuf> = match &args.before {
        Some(before) => vec![before.clone(), args.after.clone().unwrap_or(me)],
        None => vec![me],
    };
    let mut times = Times::new();
    for round in 0..args.rounds {
        for &ranks in &args.ranks {
            for turn in 0..programs.len() {
                let which = if round % 2 == 0 { turn } else { programs.len() - 1 - turn };
                complain(format_args!(
                    "round {} of {}, {ranks} ranks: {}",
                    round + 1,
                    args.rounds,
                    programs[which].display()
                ));
                for (case, us) in timed(args, &programs[which], ranks)? {
                    times.entry(case).or_default()[which].push(us);
                }
            }
        }
    }
    report(args, &programs, &times)
}

/// The times of one run of `program`.
fn timed(args: &SharedArgs, program: &Path, ranks: usize) -> Result<Vec<(Case, f64)>> {
    let backend = worlds::backend(args.backend)?;
    let mut child = Command::new(program);
    if ranks > 2 {
        child.args(["run", "-n", &ranks.to_string(), "--"]).arg(program);
    }
    child.args(["bench", "--json", "--backend", &backend.to_string()]);
    if ranks == 2 {
        child.args(["--ranks", "2"]);
    }
    let ops = if args.op.is_empty() { OPS } else { &args.op };
    child.args(["--op", ops]);
    if args.sizes.is_empty() {
        let read = |beginnings: &[&str]| {
            ops.split(',').any(|op| beginnings.iter().any(|begins| op.starts_with(begins)))
        };
        let sizes = if backend == BackendKind::Host { ON_HOST } else { ON_DEVICES };
        for (_, flags) in sizes.iter().filter(|s| read(s.0)) {
            child.args(flags.split_whitespace());
        }
    } else {
        child.args(&args.sizes);
    }
    let out =
        child.stderr(Stdio::inherit()).output().map_err(|e| Error::io(program.display(), e))?;
    if !out.status.success() {
        return Err(Error::new(ErrorKind::Io, "a program that was timed failed")
            .seen(format_args!("{}: {}", program.display(), out.status)));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    // Of processes the launcher may put the rank in front.
    let rows = text.lines().filter_map(|l| l.find('{').and_then(|at| l.get(at..)));
    rows.map(|line| {
        let row: Value = serde_json::from_str(line)
            .map_err(|e| Error::new(ErrorKind::Corrupt, format!("a row of a benchmark: {e}")))?;
        let us = row["t_ours_us"].as_f64().unwrap_or(f64::NAN);
        Ok((Case::of(&row)?, us))
    })
    .collect()
}

/// Prints a record for each case.
fn report(args: &SharedArgs, programs: &[PathBuf], times: &Times) -> Result<i32> {
    let mut slower = 0;
    if times.is_empty() {
        return Err(Error::invalid("no case was timed").hint("name operations by --op"));
    }
    for (c, [first, second]) in times {
        let mut record = json!({
            "version": ROW_VERSION, "op": c.op, "backend": c.backend, "device": c.device,
            "dtype": c.dtype, "ranks": c.ranks, "shape": c.shape,
        });
        if programs.len() == 1 {
            record["us"] = json!(first);
            record["median_us"] = json!(median(first));
            record["apart"] = json!(apart(first));
        } else {
            if first.len() != args.rounds || second.len() != args.rounds {
                complain(format_args!("{} {}: timed by one program alone", c.op, c.shape));
                continue;
            }
            let compared = Compared::of(first, second);
            slower += usize::from(compared.slower);
            record["before_us"] = json!(first);
            record["after_us"] = json!(second);
            record["before_median_us"] = json!(median(first));
            record["after_median_us"] = json!(median(second));
            record["ratio"] = json!(compared.ratio);
            record["before_against_before"] = json!(compared.before_against_before);
            record["slower"] = json!(compared.slower);
        }
        match args.json {
            true => say(record),
            false => say(line(c, &record)),
        }
    }
    Ok(i32::from(slower > 0))
}

fn line(c: &Case, r: &Value) -> String {
    let number = |key: &str| r[key].as_f64().unwrap_or(f64::NAN);
    let name = format!("{:<34} {:<5} {} ranks  {:<34}", c.op, c.dtype, c.ranks, c.shape);
    if r["ratio"].is_null() {
        let apart = 100.0 * number("apart");
        return format!("{name} {:>10.1} us, rounds {apart:.1} % apart", number("median_us"));
    }
    format!(
        "{name} {:>10.1} -> {:>10.1} us, ratio {:.3}, before against before {:.1} %{}",
        number("before_median_us"),
        number("after_median_us"),
        number("ratio"),
        100.0 * number("before_against_before"),
        if r["slower"] == true { "  SLOWER" } else { "" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_slower_is_told_from_noise() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!((apart(&[100.0, 105.0, 101.0]) - 0.05).abs() < 1e-12);
        let quiet = [100.0, 100.5, 100.2];
        assert!(!Compared::of(&quiet, &[102.0, 102.1, 101.9]).slower, "2 % are allowed");
        assert!(Compared::of(&quiet, &[103.0, 103.1, 102.9]).slower);
        // As far as the program of before is from itself.
        assert!(!Compared::of(&[100.0, 108.0, 102.0], &[107.0, 108.0, 109.0]).slower);
        assert!(Compared::of(&quiet, &[f64::NAN; 3]).slower, "no number");
    }
}
