//! `tilewire bench`: running, printing, comparing.

use std::path::Path;

use serde_json::Value;
use tilewire::prelude::*;

use super::device;
use super::flags;
use super::parts::{self, Options};
use crate::args::{BenchArgs, PlaceArgs};
use crate::rows::{ROW_VERSION, Row};
use crate::{complain, say, worlds};

/// Runs the command; returns the exit code: 1 if a result is wrong or slower than allowed. `commit`
/// is what this program was built from, where its build says so.
///
/// # Errors
/// Bad arguments, files, the fault of a team.
pub fn run(args: &BenchArgs, commit: Option<&str>) -> Result<i32> {
    let backend = worlds::backend(args.backend)?;
    if backend != BackendKind::Host {
        return on_devices(args, backend, commit);
    }
    let ops = if args.op.is_empty() { every_op(parts::ops(), args.dtype) } else { args.op.clone() };
    flags::check(backend, &ops, &args.given)?;
    let options = Options {
        ops,
        dtype: args.dtype,
        m: args.m,
        n: args.n,
        k: args.k,
        iters: args.iters,
        warmup: args.warmup,
        as_on_devices: Some(on_host(args)),
    };
    let place = worlds::place(&PlaceArgs::default())?;
    let before = rows_before(args, &place)?;
    let visible = !args.json && !args.csv && !args.md;
    let announce = |world: &World, op: &str| {
        if visible && world.rank().get() == 0 {
            complain(format_args!("bench {op} on {} ranks ...", world.size()));
        }
    };
    let rows = if worlds::launched(&place) {
        let world = worlds::join(&place, worlds::world_cfg(args.timeout_s, 600.0)?)?;
        let rows = parts::run(&world, &options, |op| announce(&world, op))?;
        world.everyone("end")?.agree(true)?;
        if world.rank().get() != 0 {
            return Ok(i32::from(rows.iter().any(|r| r.wrong > 0)));
        }
        rows
    } else {
        let cfg = worlds::world_cfg(args.timeout_s, 600.0)?;
        World::run_threads(args.ranks, cfg, |world| {
            parts::run(&world, &options, |op| announce(&world, op))
        })?
        .swap_remove(0)
    };
    print(&rows, args, commit);
    let mut code = i32::from(rows.iter().any(|r| r.wrong > 0));
    if let Some(old) = &args.compare {
        code |= i32::from(compare(&rows, (old, &before), args.threshold)? > 0);
    }
    Ok(code)
}

fn device_options(args: &BenchArgs, backend: BackendKind) -> device::Options {
    device::Options {
        ops: Vec::new(),
        backend,
        dtype: args.dtype,
        bytes: args.bytes.clone(),
        tokens: args.tokens,
        hidden: args.hidden,
        experts: (args.experts, args.top_k),
        align: args.align,
        layout: args.layout,
        sms: args.sms,
        zero_copy: args.zero_copy,
        documents: args.documents,
        shape: (args.m, args.n, args.k),
        iters: args.iters,
        warmup: args.warmup,
    }
}

/// Of what is timed on the host as on devices: sizes that were not given are those of a laptop.
fn on_host(args: &BenchArgs) -> device::Options {
    let or = |flag: &str, value: usize, small: usize| match args.given.iter().any(|g| g == flag) {
        true => value,
        false => small,
    };
    device::Options {
        tokens: or("tokens", args.tokens, 256),
        hidden: or("hidden", args.hidden, 512),
        experts: (or("experts", args.experts, 16), or("top_k", args.top_k, 4)),
        align: or("align", args.align, 8),
        ..device_options(args, BackendKind::Host)
    }
}

/// The operations that are timed on devices.
fn on_devices(args: &BenchArgs, backend: BackendKind, commit: Option<&str>) -> Result<i32> {
    let all = || every_op(device::ops(), args.dtype);
    let ops = if args.op.is_empty() { all() } else { args.op.clone() };
    flags::check(backend, &ops, &args.given)?;
    let options = device::Options { ops, ..device_options(args, backend) };
    options.check()?;
    let visible = !args.json && !args.csv && !args.md;
    let place = worlds::place(&PlaceArgs::default())?;
    let before = rows_before(args, &place)?;
    let one = |world: &World| {
        let first = world.rank().get() == 0;
        device::run(
            world,
            &options,
            |op| {
                if visible && first {
                    complain(format_args!("bench {op} on {} GPUs ...", world.size()));
                }
            },
            // Who stops it keeps what is done.
            |row| {
                if args.json && first {
                    print(std::slice::from_ref(row), args, commit);
                }
            },
        )
    };
    let rows = if worlds::launched(&place) {
        let world = worlds::join(&place, worlds::world_cfg(args.timeout_s, 60.0)?)?;
        let rows = one(&world)?;
        world.everyone("end")?.agree(true)?;
        if world.rank().get() != 0 {
            return Ok(i32::from(rows.iter().any(|r| r.wrong > 0)));
        }
        rows
    } else {
        World::run_threads(args.ranks, worlds::world_cfg(args.timeout_s, 60.0)?, |world| {
            one(&world)
        })?
        .swap_remove(0)
    };
    if !args.json {
        print(&rows, args, commit);
    }
    if visible {
        for r in &rows {
            let note = r.note.as_deref().unwrap_or_default();
            say(format_args!("{} {}: {note}", r.op, r.shape));
        }
    }
    let mut code = i32::from(rows.iter().any(|r| r.wrong > 0));
    if let Some(old) = &args.compare {
        code |= i32::from(compare(&rows, (old, &before), args.threshold)? > 0);
    }
    Ok(code)
}

/// Those of `all` that take `dtype`; names the others.
fn every_op(all: Vec<&'static str>, dtype: DType) -> Vec<String> {
    let (fit, not): (Vec<&str>, _) = all.into_iter().partition(|op| parts::takes(op, dtype));
    if !not.is_empty() {
        complain(format_args!("left out: {} are not timed in {dtype}", not.join(", ")));
    }
    fit.into_iter().map(str::to_owned).collect()
}

fn cell(v: Option<f64>) -> String {
    v.map_or("-".to_owned(), |v| format!("{v:.1}"))
}

fn cells(r: &Row) -> Vec<String> {
    vec![
        r.op.clone(),
        r.dtype.clone(),
        r.ranks.to_string(),
        r.shape.clone(),
        cell(r.t_gemm_us),
        cell(r.t_comm_us),
        cell(r.t_seq_us),
        cell(r.t_ours_us),
        cell(r.spread_us.ours),
        cell(r.speedup()),
        cell(r.hidden()),
        cell(r.algbw_gbs),
        cell(r.busbw_gbs),
        cell(r.mem_gbs),
        match r.max_err {
            Some(e) => format!("{e:.1e}"),
            None if r.wrong == 0 => "-".to_owned(),
            None => "not finite".to_owned(),
        },
        r.wrong.to_string(),
    ]
}

const HEAD: [&str; 16] = [
    "op", "dtype", "ranks", "shape", "t_gemm", "t_comm", "t_seq", "t_ours", "spread", "speedup",
    "hidden%", "algbw", "busbw", "memory", "max_err", "#wrong",
];

/// Version of NVIDIA's driver, where there is one.
fn driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    text.split_whitespace().find(|w| w.split('.').count() >= 3).map(str::to_owned)
}

/// Returns what this process was called with.
fn command() -> String {
    std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn print(rows: &[Row], args: &BenchArgs, commit: Option<&str>) {
    if args.json {
        for r in rows {
            // A row is plain numbers and text: it always has a JSON form.
            if let Ok(mut v) = serde_json::to_value(r) {
                v["version"] = ROW_VERSION.into();
                v["speedup"] = r.speedup().into();
                v["hidden_percent"] = r.hidden().into();
                v["driver"] = driver().into();
                v["commit"] = commit.into();
                v["command"] = command().into();
                say(v);
            }
        }
    } else if args.csv {
        say(HEAD.join(","));
        rows.iter().for_each(|r| say(cells(r).join(",")));
    } else if args.md {
        say(format_args!("| {} |", HEAD.join(" | ")));
        say(format_args!("|{}", "---|".repeat(HEAD.len())));
        rows.iter().for_each(|r| say(format_args!("| {} |", cells(r).join(" | "))));
    } else {
        let line = |c: &[String]| {
            let numbers = c[4..].iter().map(|c| format!(" {c:>10}")).collect::<String>();
            format!("{:<25} {:<6} {:>5}  {:<28}{numbers}", c[0], c[1], c[2], c[3])
        };
        let backend = rows.first().map_or("host", |r| &r.backend);
        say(format_args!(
            "# {backend} backend, times in us: median over iterations of the slowest rank; spread: interquartile range of \
             t_ours; algbw, busbw and memory in GB/s; -: not measured, or less than the noise"
        ));
        say(line(&HEAD.map(str::to_owned)));
        rows.iter().for_each(|r| say(line(&cells(r))));
    }
}

/// The rows of the file that is compared with, on the rank that does so: what is wrong with it is
/// reported before anything is timed.
///
/// # Errors
/// `Io` if it cannot be read, `Corrupt` if it holds no rows of this version.
fn rows_before(args: &BenchArgs, place: &tilewire::boot::Place) -> Result<Vec<Value>> {
    let first = !worlds::launched(place) || place.rank.get() == 0;
    let Some(old) = args.compare.as_deref().filter(|_| first) else { return Ok(Vec::new()) };
    let text = crate::files::text(old)?;
    let lines = text.lines().filter(|l| !l.trim().is_empty());
    let row = |line: &str| -> Result<Value> {
        let v: Value = serde_json::from_str(line)
            .map_err(|e| Error::new(ErrorKind::Corrupt, format!("{}: {e}", old.display())))?;
        match v["version"] == ROW_VERSION {
            true => Ok(v),
            false => Err(Error::new(ErrorKind::Corrupt, "the file's rows have another version")
                .expected(ROW_VERSION)
                .seen(&v["version"])),
        }
    };
    lines.map(row).collect()
}

/// Prints ratios against an earlier `--json` output, and the rows that are in one of them alone;
/// returns how many ratios are above the threshold.
///
/// # Errors
/// `InvalidArgument` if no row is in both, as nothing was compared then.
fn compare(rows: &[Row], (old, before): (&Path, &[Value]), threshold: f64) -> Result<usize> {
    let (mut slower, mut seen) = (0, vec![false; rows.len()]);
    for v in before {
        let same = |r: &Row| {
            v["op"] == r.op
                && v["dtype"] == r.dtype
                && v["ranks"] == r.ranks
                && v["shape"] == r.shape
        };
        // A time of another backend or device says nothing about a change.
        let place = |r: &Row| v["backend"] == r.backend && v["device"] == r.device;
        let alike = rows.iter().position(|r| same(r) && place(r));
        let (Some(i), Some(before)) = (alike, v["t_ours_us"].as_f64()) else {
            let word = |k: &str| v[k].as_str().map_or_else(|| v[k].to_string(), str::to_owned);
            let [op, dtype, ranks, shape] = ["op", "dtype", "ranks", "shape"].map(word);
            let why = match rows.iter().find(|r| same(r)) {
                Some(r) if !place(r) => {
                    let [backend, device] = ["backend", "device"].map(word);
                    let now = format!("{} on {}", r.backend, r.device);
                    format!("timed by {backend} on {device} then, by {now} now")
                }
                _ => "not timed now".to_owned(),
            };
            complain(format_args!("{op} {dtype} ranks={ranks} {shape}: {why}"));
            continue;
        };
        seen[i] = true;
        let ratio = rows[i].t_ours_us.unwrap_or(f64::NAN) / before;
        let good = ratio <= 1.0 + threshold;
        slower += usize::from(!good);
        complain(format_args!(
            "{:<15} {ratio:.3} x the time before{}",
            rows[i].op,
            if good { "" } else { "  SLOWER" }
        ));
    }
    for (r, _) in rows.iter().zip(&seen).filter(|(_, seen)| !**seen) {
        let Row { op, dtype, ranks, shape, .. } = r;
        complain(format_args!("{op} {dtype} ranks={ranks} {shape}: not in {}", old.display()));
    }
    if !seen.contains(&true) {
        return Err(Error::invalid(format!(
            "{}: no row matches, so that nothing was compared",
            old.display()
        ))
        .hint("time with the same --backend, GPU, --op, --dtype, --ranks and sizes as then"));
    }
    Ok(slower)
}
