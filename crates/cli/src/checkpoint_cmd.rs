//! `tilewire checkpoint`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::json;
use tilewire::nn::checkpoint::{self, Found, Verified};
use tilewire::prelude::*;

use crate::say;

/// `tilewire checkpoint`
#[derive(Debug, Subcommand)]
pub enum CheckpointCommand {
    /// List the checkpoints in a folder, the newest first, by their manifests.
    List(CheckpointArgs),
    /// Read one checkpoint, or all in a folder, whole, and name everything that is damaged; exit
    /// code 1 if anything is.
    Verify(CheckpointArgs),
}

/// `tilewire checkpoint list` and `verify`
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// The folder of `train --checkpoint`, or one checkpoint in it.
    pub path: PathBuf,
    /// Print one JSON object per checkpoint.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command; returns the exit code.
///
/// # Errors
/// `Io` if nothing is there.
pub fn run(command: &CheckpointCommand) -> Result<i32> {
    match command {
        CheckpointCommand::List(args) => list(args),
        CheckpointCommand::Verify(args) => verify(args),
    }
}

fn list(args: &CheckpointArgs) -> Result<i32> {
    let all = checkpoint::list(&args.path)?;
    let empty = all.is_empty();
    for found in &all {
        match args.json {
            true => say(row(found)),
            false => say(line(found)),
        }
    }
    if empty && !args.json {
        say(format_args!("{}: no checkpoint", args.path.display()));
    }
    Ok(0)
}

fn line(f: &Found) -> String {
    let path = f.path.display();
    match &f.manifest {
        Err(e) => format!("{path}  damaged: {}", e.message()),
        Ok(m) => {
            let (g, r) = (&m.run.grid, &m.run);
            format!(
                "{path}  step {}, {:.1} MB in {} files, dp {} x cp {} x tp {}, {}, task {}, tilewire {}",
                m.step,
                f.bytes() as f64 / 1e6,
                m.files.len(),
                g.dp,
                g.cp,
                g.tp,
                r.dtype,
                r.data.task,
                m.tilewire
            )
        }
    }
}

fn row(f: &Found) -> serde_json::Value {
    match &f.manifest {
        Err(e) => json!({ "path": f.path, "damaged": e.to_string() }),
        Ok(m) => json!({
            "path": f.path,
            "step": m.step,
            "bytes": f.bytes(),
            "files": m.files.len(),
            "tensors": m.tensors.len(),
            "tilewire": m.tilewire,
            "run": m.run,
        }),
    }
}

fn verify(args: &CheckpointArgs) -> Result<i32> {
    let all = checkpoint::verify(&args.path)?;
    for v in &all {
        match args.json {
            true => say(verified(v)),
            false => {
                let (path, mb) = (v.path.display(), v.bytes as f64 / 1e6);
                match v.damage.len() {
                    0 => say(format_args!("{path}: whole, {mb:.1} MB")),
                    n => say(format_args!("{path}: damaged in {n} places")),
                }
                v.damage.iter().for_each(|e| say(format_args!("  {}", e.message())));
            }
        }
    }
    Ok(i32::from(all.iter().any(|v| !v.damage.is_empty())))
}

fn verified(v: &Verified) -> serde_json::Value {
    let damage: Vec<_> = v.damage.iter().map(ToString::to_string).collect();
    json!({ "path": v.path, "step": v.step, "bytes": v.bytes, "damage": damage })
}
