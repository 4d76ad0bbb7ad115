//! `tilewire verify`.

use std::time::{Duration, Instant};

use tilewire::prelude::*;

use crate::args::VerifyArgs;
use crate::progress::Progress;
use crate::rows::Row;
use crate::verify::{self, Case, Options};
use crate::{say, worlds};

/// Runs the command; returns the exit code.
///
/// # Errors
/// Bad arguments, or a job that cannot be joined. Wrong results are exit code 1, not an error.
pub fn run(args: &VerifyArgs) -> Result<i32> {
    let options = Options {
        ops: args.op.clone(),
        dtypes: args.dtype.clone(),
        shape: args.shape.iter().cloned().collect(),
        seed: args.seed,
        atol: args.atol,
        rtol: args.rtol,
        backend: worlds::backend(args.backend)?,
    };
    let cases = verify::cases(&options)?;
    if cases.is_empty() {
        return Err(Error::invalid(
            "there is nothing to verify: no case has these operations and dtypes",
        ));
    }
    let place = worlds::place(&args.place)?;
    let start = Instant::now();
    let mut all = Vec::new();
    if worlds::launched(&place) {
        let world = worlds::join(&place, worlds::world_cfg(args.timeout_s, 60.0)?)?;
        let speaks = world.rank().get() == 0;
        let bar = Progress::new(cases.len(), &format!("{} ranks", world.size()), speaks);
        let rows = verify::run(&world, &cases, &options, |i, c| step(&bar, i, c))
            .inspect_err(|e| world.leave_because(e))?;
        bar.end();
        if speaks {
            print(&rows, args);
            all = rows;
        } else {
            return Ok(i32::from(rows.iter().any(|r| r.wrong > 0)));
        }
    } else {
        for &n in &args.ranks {
            if !(1..=64).contains(&n) {
                return Err(Error::invalid(format!("--ranks {n}: must be 1 to 64")));
            }
            let bar = Progress::new(cases.len(), &format!("{n} ranks"), true);
            let cfg = worlds::world_cfg(args.timeout_s, 60.0)?;
            let mut rows = World::run_threads(n, cfg, |world| {
                let speaks = world.rank().get() == 0;
                verify::run(&world, &cases, &options, |i, c| {
                    if speaks {
                        step(&bar, i, c);
                    }
                })
            })?;
            bar.end();
            let rows = rows.swap_remove(0);
            print(&rows, args);
            all.extend(rows);
        }
    }
    Ok(summary(&all, start.elapsed(), args.json))
}

fn step(bar: &Progress, i: usize, case: &Case) {
    bar.step(i, &format!("{} {} {}", case.op, case.dtype, case.shape_text()));
}

fn print(rows: &[Row], args: &VerifyArgs) {
    for r in rows.iter().filter(|r| !args.quiet || r.wrong > 0) {
        if args.json {
            // A row is plain numbers and text: it always has a JSON form.
            if let Ok(mut v) = serde_json::to_value(r) {
                v["version"] = crate::rows::ROW_VERSION.into();
                say(v);
            }
        } else {
            let err = r.max_err.map_or("not finite".to_owned(), |e| format!("{e:.3e}"));
            // Without a number nothing was compared: the case could not run.
            let state = match (r.wrong, r.max_err) {
                _ if r.unsupported && r.wrong == 0 => "none",
                (0, _) => "ok",
                (_, None) => "ERROR",
                _ => "WRONG",
            };
            say(format_args!(
                "{:<5} {:<18} {:<7} ranks={:<2} {:<18} max_err={:<10} #wrong={}",
                state, r.op, r.dtype, r.ranks, r.shape, err, r.wrong
            ));
            if let Some(n) = &r.note {
                say(format_args!("      {}", n.replace('\n', "\n      ")));
            }
        }
    }
}

fn summary(rows: &[Row], elapsed: Duration, json: bool) -> i32 {
    let wrong = rows.iter().filter(|r| r.wrong > 0).count();
    let none = rows.iter().filter(|r| r.wrong == 0 && r.unsupported).count();
    if !json {
        let rest = match none {
            0 => String::new(),
            _ => format!("; {none} cases are not on this backend"),
        };
        say(format_args!(
            "{} of {} cases right in {:.1} s{rest}",
            rows.len() - wrong - none,
            rows.len() - none,
            elapsed.as_secs_f64()
        ));
    }
    // Nothing that ran is no success.
    i32::from(wrong > 0 || none == rows.len())
}
