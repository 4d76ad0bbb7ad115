//! `tilewire run`.

use tilewire::boot::Launch;
use tilewire::prelude::*;

use crate::args::RunArgs;
use crate::complain;

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
    launch.timeout = args.timeout_s.map(crate::worlds::seconds).transpose()?;
    launch.no_prefix = args.no_prefix;
    let report = launch.run_to(Box::new(crate::Out), Box::new(std::io::stderr()))?;
    if let Some(f) = &report.first_failure {
        complain(format_args!(
            "tilewire run: rank {} failed first ({:?}), after {:.1} s; its last lines:",
            f.rank.get(),
            f.status,
            report.elapsed.as_secs_f64()
        ));
        for line in &f.last_stderr {
            complain(format_args!("    {line}"));
        }
    }
    if report.timed_out {
        complain("tilewire run: ended at the time limit (--timeout-s)");
    }
    Ok(report.code)
}
