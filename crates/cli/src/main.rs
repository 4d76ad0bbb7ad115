//! The `tilewire` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use tilewire::boot::limits;
use tilewire::device::cuda::load_library;
use tilewire::prelude::*;
use tilewire_cli::args::{BenchWhat, Cli, Command};
use tilewire_cli::{
    bench, checkpoint_cmd, complain, doctor, dump, end, kernels_cmd, launch, links, plan_cmd,
    report, say_all, topo, trace, train, verify_cmd,
};

/// Memory that lacks is an error, not an abort.
#[global_allocator]
static ALLOC: limits::Alloc = limits::Alloc;

/// Log lines go to standard error, as one line each.
struct Logger;

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        complain(format_args!("{}: {}", record.level().as_str().to_lowercase(), record.args()));
    }
    fn flush(&self) {}
}

fn main() -> ExitCode {
    // Before there are threads.
    limits::expect_address_limit();
    // The limit of the main thread's stack may be too low for what follows.
    let done = limits::expect_file_limit().and_then(|()| limits::with_stack(command));
    done.unwrap_or_else(|e| {
        report(&e);
        ExitCode::from(2)
    })
}

fn command() -> ExitCode {
    let matches = Cli::command().get_matches();
    let mut cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    if let (Command::Bench(args), Some(matches)) =
        (&mut cli.command, matches.subcommand_matches("bench"))
    {
        args.given = bench::flags::given(matches);
    }
    let code = run(cli).unwrap_or_else(|e| {
        report(&e);
        2
    });
    ExitCode::from(end(code).clamp(0, 255) as u8)
}

fn run(cli: Cli) -> Result<i32> {
    if let (Command::Run(_), Some(file)) = (&cli.command, cli.library.first()) {
        // The launcher itself loads nothing.
        return Err(Error::invalid("--library is for the program that uses it")
            .seen(file.display())
            .hint("write it behind `--`, with the program's own arguments"));
    }
    for file in &cli.library {
        load_library(file)?;
    }
    match &cli.command {
        // These must work where the environment is broken: they are there to say so.
        Command::Doctor(args) => return Ok(doctor::run(args)),
        Command::Completions { shell } => {
            let mut command = Cli::command();
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut command, "tilewire", &mut text);
            say_all(&text);
            return Ok(0);
        }
        Command::Env => {
            tilewire_cli::env_table();
            return Config::from_env().map(|_| 0);
        }
        // It must not end before its launcher.
        Command::Warden => return tilewire::boot::watch_launcher().map(|_| 0),
        _ => {}
    }
    let config = Config::from_env()?;
    // Only the first logger counts, and there is no other.
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(match config.log {
            tilewire::core::LogLevel::Error => log::LevelFilter::Error,
            tilewire::core::LogLevel::Warn => log::LevelFilter::Warn,
            tilewire::core::LogLevel::Info => log::LevelFilter::Info,
            tilewire::core::LogLevel::Debug => log::LevelFilter::Debug,
        });
    }
    match &cli.command {
        Command::Run(args) => launch::run(args),
        Command::Verify(args) => verify_cmd::run(args),
        Command::Train(args) => train::run(args),
        Command::Bench(args) => match &args.what {
            Some(BenchWhat::Links(args)) => links::run(args),
            Some(BenchWhat::Shared(args)) => bench::shared::run(args),
            // Read here, as this crate is small: a new commit builds no other again.
            None => bench::cmd::run(args, option_env!("TILEWIRE_COMMIT")),
        },
        Command::Topo(args) => topo::run(args),
        Command::Dump(args) => dump::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Checkpoint(command) => checkpoint_cmd::run(command),
        Command::Plan(command) => plan_cmd::run(command),
        Command::Kernels(command) => kernels_cmd::run(command),
        Command::Doctor(_) | Command::Completions { .. } | Command::Env | Command::Warden => Ok(0),
    }
}
