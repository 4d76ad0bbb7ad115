//! Command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tilewire::prelude::*;

/// Tiles over wires: communication hidden behind arithmetic on many accelerators.
#[derive(Debug, Parser)]
#[command(name = "tilewire", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a program on several ranks of this host.
    Run(RunArgs),
    /// Check every operation against the f64 oracle.
    Verify(VerifyArgs),
    /// Say what works on this machine, and what to do about what does not.
    Doctor(DoctorArgs),
    /// List the environment variables that tilewire reads, with their values.
    Env,
    /// Print a completion script for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// `tilewire run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Number of ranks.
    #[arg(short = 'n', long = "ranks")]
    pub ranks: usize,
    /// End all ranks after this many seconds.
    #[arg(long)]
    pub timeout_s: Option<f64>,
    /// Do not put `[r3]` before the lines of rank 3.
    #[arg(long)]
    pub no_prefix: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub program: Vec<String>,
}

/// Flags that say who I am, for a launcher that sets no variables.
#[derive(Debug, Args, Default)]
pub struct PlaceArgs {
    /// My rank in the job (with --size and --store).
    #[arg(long)]
    pub rank: Option<u32>,
    /// Number of ranks in the job.
    #[arg(long)]
    pub size: Option<usize>,
    /// `host:port` of the job's store.
    #[arg(long)]
    pub store: Option<String>,
}

/// `tilewire verify`
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Rank counts, each as threads of this process. Under a launcher the job's size is used.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    pub ranks: Vec<usize>,
    /// Only these operations.
    #[arg(long, value_delimiter = ',')]
    pub op: Vec<String>,
    /// Only these element types.
    #[arg(long, value_delimiter = ',')]
    pub dtype: Vec<DType>,
    /// Replace sizes of the cases, e.g. `m=128,n=64`.
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    pub shape: Vec<(String, usize)>,
    /// Seed of the random inputs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Absolute tolerance instead of the rule of the design.
    #[arg(long)]
    pub atol: Option<f64>,
    /// Relative tolerance instead of the rule of the design.
    #[arg(long)]
    pub rtol: Option<f64>,
    /// Seconds that a wait on a live peer may last.
    #[arg(long, default_value_t = 60.0)]
    pub timeout_s: f64,
    /// Print one JSON object per row instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Print only rows that are wrong, and the summary.
    #[arg(long, short)]
    pub quiet: bool,
    /// Who I am.
    #[command(flatten)]
    pub place: PlaceArgs,
}

fn parse_size(s: &str) -> std::result::Result<(String, usize), String> {
    let (name, value) = s.split_once('=').ok_or("write name=value, e.g. m=128")?;
    let value = value.parse().map_err(|_| format!("`{value}` is not a whole number"))?;
    Ok((name.to_owned(), value))
}

/// `tilewire doctor`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Where to look for leftovers of crashed jobs.
    #[arg(long, default_value = "/dev/shm")]
    pub shm: PathBuf,
}
