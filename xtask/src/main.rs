//! Automation: `cargo xtask test` runs everything, `cargo xtask tidy` checks the house rules.

mod acceptance;
mod api;
mod bundle;
mod dependencies;
mod drill;
mod editor;
mod fuzz;
mod kernels;
mod layout;
mod libraries;
mod outcome;
mod prose;
mod python;
mod stages;
mod suites;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Automation of this repository")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all tests; prints each stage's time and download size, that of each test binary, and a
    /// summary line. What did not run is no test that passed: it is counted by reason, and limited.
    Test {
        /// Only stages whose name contains this.
        #[arg(long)]
        only: Option<String>,
        /// List the stages.
        #[arg(long)]
        list: bool,
        /// The inner loop, at most five minutes on two processors once it is built: house rules,
        /// spelling, and the test binaries that take seconds.
        #[arg(long, conflicts_with = "full")]
        fast: bool,
        /// Also what other tests show, too: every size of the emulated matrix, and each kernel
        /// twice.
        #[arg(long)]
        full: bool,
    },
    /// Check file sizes, dependency direction, unsafe code and the operations' folders.
    Tidy,
    /// Compare the public interface (signatures, defaults, flags) with tests/api.
    Api {
        /// Write tests/api instead of comparing.
        #[arg(long)]
        bless: bool,
    },
    /// Make target/gpu-bundle: programs, kernels and `run.sh` for a machine with GPUs.
    GpuBundle {
        /// Architectures to compile kernels for.
        #[arg(long, value_delimiter = ',', default_value = "sm_90a")]
        arch: Vec<String>,
        /// NVRTC to use, a file or its folder. Default: the pinned wheel, then what is found.
        #[arg(long)]
        nvrtc: Option<PathBuf>,
    },
    /// Write compile_commands.json, by which clangd reads the kernels.
    CompileCommands,
    /// Harm random jobs at random, and judge how they end; needs the release build of the command.
    Drill(drill::DrillArgs),
    /// Run the decoders on mutated inputs, each target for a while; prints the number of inputs.
    Fuzz(fuzz::FuzzArgs),
    /// Judge one case of a drill: reads it, prints the verdict.
    #[command(hide = true)]
    Judge,
    /// Check that docs/acceptance.md accounts for every line and names existing tests.
    Acceptance,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root").to_path_buf()
}

fn main() -> ExitCode {
    let root = root();
    let problems = match Cli::parse().command {
        Command::Test { only, list, fast, full } => {
            let extent = match (fast, full) {
                (true, _) => suites::Extent::Fast,
                (_, true) => suites::Extent::Full,
                _ => suites::Extent::Usual,
            };
            return stages::run(&root, only.as_deref(), list, extent);
        }
        Command::Drill(args) => drill::run(&root, &args).problems(),
        Command::Fuzz(args) => fuzz::run(&root, &args),
        Command::Judge => {
            drill::judge();
            return ExitCode::SUCCESS;
        }
        Command::Tidy => tidy::check(&root),
        Command::GpuBundle { arch, nvrtc } => bundle::make(&root, &arch, nvrtc.as_deref()),
        Command::CompileCommands => editor::write(&root),
        Command::Acceptance => acceptance::check(&root),
        Command::Api { bless } => match api::check(&root, bless) {
            api::Verdict::Problems(p) => p,
            api::Verdict::Skipped(why) => vec![why],
        },
    };
    for p in &problems {
        eprintln!("{p}");
    }
    println!("{} problems", problems.len());
    ExitCode::from(u8::from(!problems.is_empty()))
}
