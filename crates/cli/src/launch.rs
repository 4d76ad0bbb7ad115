//! `tilewire run`.

use std::ffi::OsString;
use std::sync::mpsc;
use std::time::Duration;

use clap::Args;
use tilewire::boot::Launch;
use tilewire::prelude::*;

use crate::complain;

/// `tilewire run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Number of ranks.
    #[arg(short = 'n', long = "ranks")]
    pub ranks: usize,
    /// End all ranks after this many seconds.
    #[arg(long)]
    pub timeout_s: Option<f64>,
    /// Seconds that ranks have for their end when the job is asked to end: after SIGTERM, SIGINT or
    /// SIGHUP, which they get, after a failure, and at the time limit.
    #[arg(long, default_value_t = 3.0)]
    pub grace_s: f64,
    /// Failures to answer by a restart: ranks that have ended are started anew, and those that
    /// have lost a peer meet them again. `train --checkpoint` goes on from its newest whole
    /// checkpoint; other programs are started anew whole. An error that would come again ends the
    /// job: status 2 of a rank that has not met the others yet, as of bad arguments, and what
    /// `train` finds wrong with its arguments later.
    #[arg(long, default_value_t = 0)]
    pub max_restarts: u32,
    /// Do not put `[r3]` before the lines of rank 3.
    #[arg(long)]
    pub no_prefix: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub program: Vec<OsString>,
}

/// Runs the program on all ranks; returns the exit code.
///
/// # Errors
/// `InvalidArgument` for bad arguments, `Io` if the program cannot be started.
pub fn run(args: &RunArgs) -> Result<i32> {
    let Some((program, rest)) = args.program.split_first() else {
        return Err(Error::invalid("no program is given").hint("tilewire run -n 4 -- prog args"));
    };
    let mut launch = Launch::new(args.ranks, program);
    launch.args = rest.to_vec();
    launch.timeout =
        args.timeout_s.map(|s| crate::worlds::seconds("--timeout-s", s)).transpose()?;
    launch.no_prefix = args.no_prefix;
    launch.max_restarts = args.max_restarts;
    launch.grace = crate::worlds::seconds("--grace-s", args.grace_s)?;
    // Without a program of its own, ranks end with their launcher, but not what they have started.
    launch.warden = std::env::current_exe().map_or(Vec::new(), |e| vec![e.into(), "warden".into()]);
    let report = launch.run_to(Box::new(crate::Out), Box::new(std::io::stderr()))?;
    let mut lines = Vec::new();
    if let Some(f) = &report.first_failure {
        lines.push(format!(
            "tilewire run: rank {} failed first ({:?}), after {:.1} s; its last lines:",
            f.rank.get(),
            f.status,
            report.elapsed.as_secs_f64()
        ));
        lines.extend(f.last_stderr.iter().map(|line| format!("    {line}")));
    }
    lines.extend(report.findings().iter().map(|line| format!("tilewire run: {line}")));
    if report.timed_out {
        lines.push("tilewire run: ended at the time limit (--timeout-s)".to_owned());
    }
    if report.lost_output > 0 {
        let lost = report.lost_output;
        lines.push(format!("tilewire run: {lost} bytes of output were dropped: nobody read them"));
        leave(lines, report.code);
    }
    lines.iter().for_each(complain);
    Ok(report.code)
}

/// Longest time for the last messages, where a stream of ours is stuck.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Ends the process while a thread still writes to a stream that nobody reads. It holds that
/// stream's lock, which may be that of standard error as well.
fn leave(lines: Vec<String>, code: i32) -> ! {
    let (done, all_said) = mpsc::channel();
    let say = move || {
        lines.iter().for_each(complain);
        // Who waits for it may have given up.
        done.send(()).ok();
    };
    if std::thread::Builder::new().spawn(say).is_ok() {
        all_said.recv_timeout(LAST_WORDS).ok();
    }
    std::process::exit(code)
}
