//! Worlds for commands: threads of this process, or this process's place in a job.

use std::time::Duration;

use tilewire::boot::{Flags, Launcher, Place, detect, join_processes};
use tilewire::prelude::*;

use crate::args::PlaceArgs;

/// Who I am according to flags and environment.
///
/// # Errors
/// `Config` or `InvalidArgument` naming the variable that does not fit.
pub fn place(args: &PlaceArgs) -> Result<Place> {
    let flags = Flags {
        rank: args.rank,
        size: args.size,
        store: args.store.clone(),
        ..Flags::of_process()
    };
    // Names and values that are not UTF-8 cannot be ours or a launcher's.
    let vars = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .collect();
    detect(&flags, &vars)
}

/// The backend that was asked for, by a flag or by the environment.
///
/// # Errors
/// `Config` for a bad variable.
pub fn backend(flag: Option<BackendKind>) -> Result<BackendKind> {
    flag.map_or_else(|| Config::from_env().map(|c| c.backend), Ok)
}

/// True if this process was started as one of several ranks (or told so).
pub fn launched(place: &Place) -> bool {
    place.launcher != Launcher::Single
}

/// Joins the job that this process was started for.
///
/// # Errors
/// `Timeout` if the others or the store cannot be reached.
pub fn join(place: &Place, timeout_s: f64) -> Result<World> {
    let config = Config::from_env()?;
    let cfg = world_cfg(timeout_s)?;
    let mesh = join_processes(place, &config, Deadline::after(cfg.rendezvous_timeout))?;
    Ok(World::join(mesh, cfg))
}

/// Time limits for a command.
///
/// # Errors
/// `InvalidArgument` for a number that is not a time.
pub fn world_cfg(timeout_s: f64) -> Result<WorldCfg> {
    Ok(WorldCfg { timeout: seconds(timeout_s)?, ..WorldCfg::default() })
}

/// A time limit given on the command line.
///
/// # Errors
/// `InvalidArgument` for a number that is not a time.
pub fn seconds(s: f64) -> Result<Duration> {
    if !(s > 0.0 && s <= 1e6) {
        let text = format!("--timeout-s {s}: must be more than 0 and at most 1000000");
        return Err(Error::invalid(text));
    }
    Ok(Duration::from_secs_f64(s))
}
