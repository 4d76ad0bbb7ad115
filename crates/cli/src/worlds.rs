//! Worlds for commands: threads of this process, or this process's place in a job.

use std::time::Duration;

use tilewire::boot::{Flags, Launcher, Place, detect, join_processes};
use tilewire::prelude::*;

use crate::args::PlaceArgs;

/// Returns who I am according to flags and environment.
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

/// True if this process was started as one of several ranks, or its environment says so.
pub fn launched(place: &Place) -> bool {
    place.launcher != Launcher::Single
}

/// Joins the job that this process was started for.
///
/// # Errors
/// `Timeout` if the others or the store cannot be reached.
pub fn join(place: &Place, cfg: WorldCfg) -> Result<World> {
    let config = Config::from_env()?;
    let mesh = join_processes(place, &config, Deadline::after(cfg.rendezvous_timeout))?;
    Ok(World::join(mesh, cfg))
}

/// Time limits for a command: by its flag, or the environment, or `default_s`.
///
/// # Errors
/// `InvalidArgument` for a number that is not a time; `Config` for a bad variable.
pub fn world_cfg(flag_s: Option<f64>, default_s: f64) -> Result<WorldCfg> {
    limits(flag_s, default_s, &Config::from_env()?)
}

fn limits(flag_s: Option<f64>, default_s: f64, config: &Config) -> Result<WorldCfg> {
    let flag = flag_s.map(|s| seconds("--timeout-s", s)).transpose()?;
    let timeout = flag.or(config.timeout).map_or_else(|| seconds("--timeout-s", default_s), Ok)?;
    Ok(WorldCfg::of_timeout(timeout))
}

/// A time given on the command line, by `flag`.
///
/// # Errors
/// `InvalidArgument` for a number that is not a time.
pub fn seconds(flag: &str, s: f64) -> Result<Duration> {
    if !(s > 0.0 && s <= 1e6) {
        let text = format!("{flag} {s}: must be more than 0 and at most 1000000");
        return Err(Error::invalid(text));
    }
    Ok(Duration::from_secs_f64(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_counts_before_the_environment_and_that_before_the_default() {
        let set = Config { timeout: Some(Duration::from_secs(3000)), ..Config::default() };
        let s = |flag, config: &Config| limits(flag, 60.0, config).unwrap().timeout.as_secs();
        assert_eq!(s(None, &Config::default()), 60);
        assert_eq!(s(None, &set), 3000);
        assert_eq!(s(Some(7.0), &set), 7);
        assert_eq!(WorldCfg::of(&set).timeout.as_secs(), 3000);
        assert_eq!(WorldCfg::of(&Config::default()).timeout, WorldCfg::default().timeout);
        assert!(limits(Some(0.0), 60.0, &set).is_err());
        // The ranks meet within the same time, but never wait for more than a minute.
        let meet = |flag, config: &Config| limits(flag, 600.0, config).unwrap().rendezvous_timeout;
        assert_eq!(meet(None, &Config::default()).as_secs(), 60);
        assert_eq!(meet(Some(7.0), &set).as_secs(), 7);
        assert_eq!(meet(Some(700.0), &set).as_secs(), 60);
        let short = Config { timeout: Some(Duration::from_secs(3)), ..Config::default() };
        assert_eq!(WorldCfg::of(&short).rendezvous_timeout.as_secs(), 3);
    }
}
