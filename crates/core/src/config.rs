//! The `TILEWIRE_` variables, parsed once and strictly. Launchers' variables are read by `boot`,
//! places of libraries by `device`.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::{Error, ErrorKind, Result};

/// The source of symmetric memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum BackendKind {
    /// Ranks are threads or processes on the CPU, memory is a memfd.
    #[default]
    Host,
    /// CUDA virtual memory shared by file descriptors.
    Vmm,
    /// NCCL windows.
    Nccl,
    /// NVSHMEM heap.
    Nvshmem,
}

/// The rule for compiling kernels at run time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JitMode {
    /// Embedded kernels, then the disk cache, then the compiler.
    Auto,
    /// Never compile: a kernel that is neither embedded nor cached is an error.
    Off,
}

/// The amount of logging.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LogLevel {
    /// Errors only.
    Error,
    /// Also warnings (the default).
    Warn,
    /// Also one line for each choice made.
    Info,
    /// Everything.
    Debug,
}

macro_rules! names {
    ($t:ident, $what:literal, $($v:ident => $s:literal),+) => {
        impl $t {
            /// All legal values with their names.
            pub const NAMES: &'static [(&'static str, $t)] = &[$(($s, $t::$v)),+];

            /// The name used in options, variables and JSON.
            pub fn name(self) -> &'static str {
                match self { $($t::$v => $s),+ }
            }
        }

        impl FromStr for $t {
            type Err = Error;

            fn from_str(s: &str) -> Result<Self> {
                Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, v)| *v).ok_or_else(|| {
                    let legal: Vec<_> = Self::NAMES.iter().map(|(n, _)| *n).collect();
                    Error::invalid(format!(
                        concat!("unknown ", $what, " `{}`; one of {}"), s, legal.join(", ")
                    ))
                })
            }
        }

        impl std::fmt::Display for $t {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
names!(BackendKind, "backend", Host => "host", Vmm => "vmm", Nccl => "nccl", Nvshmem => "nvshmem");
names!(JitMode, "jit mode", Auto => "auto", Off => "off");
names!(LogLevel, "log level", Error => "error", Warn => "warn", Info => "info", Debug => "debug");

/// Process-wide settings. Everything else is a field of a `Desc` or a `Plan`.
#[derive(Clone, PartialEq)]
pub struct Config {
    /// `TILEWIRE_BACKEND`: default backend. Default `host`.
    pub backend: BackendKind,
    /// `TILEWIRE_TIMEOUT_S`: how long a wait on a live peer lasts. Default: what a command says.
    pub timeout: Option<Duration>,
    /// `TILEWIRE_CACHE_DIR`: kernel cache. Default: the platform's cache directory.
    pub cache_dir: Option<PathBuf>,
    /// `TILEWIRE_LOG`: log level. Default `warn`.
    pub log: LogLevel,
    /// `TILEWIRE_JIT`: whether kernels may be compiled at run time. Default `auto`.
    pub jit: JitMode,
    /// `TILEWIRE_SECRET`: shared secret of the job's bootstrap, 32 hex digits or more.
    pub secret: Option<String>,
    /// `TILEWIRE_RANK=rank/size@store`: place in the job, set by `tilewire run`.
    pub place: Option<String>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A log must not give the secret away.
        let secret = self.secret.as_ref().map(|_| "(hidden)");
        f.debug_struct("Config")
            .field("backend", &self.backend)
            .field("timeout", &self.timeout)
            .field("cache_dir", &self.cache_dir)
            .field("log", &self.log)
            .field("jit", &self.jit)
            .field("secret", &secret)
            .field("place", &self.place)
            .finish()
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            backend: BackendKind::Host,
            timeout: None,
            cache_dir: None,
            log: LogLevel::Warn,
            jit: JitMode::Auto,
            secret: None,
            place: None,
        }
    }
}

const PREFIX: &str = "TILEWIRE_";

impl Config {
    /// The variables with their meaning, for `tilewire env` and the docs.
    pub const VARIABLES: [(&'static str, &'static str); 7] = [
        ("TILEWIRE_BACKEND", "default backend: host, vmm, nccl, nvshmem"),
        (
            "TILEWIRE_TIMEOUT_S",
            "seconds a wait on a live peer may last, where no --timeout-s is given",
        ),
        ("TILEWIRE_CACHE_DIR", "directory of the kernel cache"),
        ("TILEWIRE_LOG", "error, warn, info or debug (default warn)"),
        ("TILEWIRE_JIT", "auto or off: compile kernels at run time"),
        ("TILEWIRE_SECRET", "shared secret of the bootstrap, at least 32 hex digits"),
        ("TILEWIRE_RANK", "rank/size@store, set by `tilewire run`"),
    ];

    /// Reads the process environment.
    ///
    /// # Errors
    /// `Config` if a `TILEWIRE_` variable is unknown or its value is not acceptable.
    pub fn from_env() -> Result<Self> {
        // Values that are not UTF-8 must be an error only where the name is ours.
        let ours = std::env::vars_os().filter_map(|(k, v)| {
            let k = k.into_string().ok()?;
            k.starts_with(PREFIX).then_some((k, v))
        });
        let text = |(k, v): (String, OsString)| {
            let bad = |_| Error::new(ErrorKind::Config, format!("{k} is not UTF-8"));
            v.into_string().map(|v| (k.clone(), v)).map_err(bad)
        };
        Self::from_vars(ours.map(text).collect::<Result<Vec<_>>>()?)
    }

    /// Parses variables given as pairs; names without the `TILEWIRE_` prefix are ignored.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_vars(vars: impl IntoIterator<Item = (String, String)>) -> Result<Self> {
        let mut c = Self::default();
        for (name, value) in vars {
            if name.starts_with(PREFIX) {
                c.set(&name, &value).map_err(|e| {
                    // A secret is never echoed.
                    let shown = if name == "TILEWIRE_SECRET" { "..." } else { &value };
                    Error::new(ErrorKind::Config, format!("{name}=`{shown}`: {}", e.message()))
                        .hint("`tilewire env` lists the variables and their values")
                })?;
            }
        }
        Ok(c)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "TILEWIRE_BACKEND" => self.backend = value.parse()?,
            "TILEWIRE_TIMEOUT_S" => self.timeout = Some(parse_seconds(value)?),
            "TILEWIRE_CACHE_DIR" if value.is_empty() => return Err(Error::invalid("is empty")),
            "TILEWIRE_CACHE_DIR" => self.cache_dir = Some(PathBuf::from(value)),
            "TILEWIRE_LOG" => self.log = value.parse()?,
            "TILEWIRE_JIT" => self.jit = value.parse()?,
            "TILEWIRE_SECRET" => {
                if value.len() < 32 || !value.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(Error::invalid("needs at least 32 hexadecimal digits"));
                }
                self.secret = Some(value.to_owned());
            }
            "TILEWIRE_RANK" => self.place = Some(value.to_owned()),
            _ => {
                let legal: Vec<_> = Self::VARIABLES.iter().map(|(n, _)| *n).collect();
                return Err(Error::invalid(format!(
                    "no such variable; one of {}",
                    legal.join(", ")
                )));
            }
        }
        Ok(())
    }
}

fn parse_seconds(value: &str) -> Result<Duration> {
    let s: f64 = value.parse().map_err(|_| Error::invalid("is not a number of seconds"))?;
    if !(s.is_finite() && s > 0.0 && s <= 1e6) {
        return Err(Error::invalid("must be more than 0 and at most 1000000 seconds"));
    }
    Ok(Duration::from_secs_f64(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(k: &str, v: &str) -> Result<Config> {
        Config::from_vars([(k.to_owned(), v.to_owned())])
    }

    #[test]
    fn good_values() {
        assert_eq!(parse("TILEWIRE_BACKEND", "vmm").unwrap().backend, BackendKind::Vmm);
        assert_eq!(
            parse("TILEWIRE_TIMEOUT_S", "2.5").unwrap().timeout,
            Some(Duration::from_millis(2500))
        );
        assert_eq!(parse("PATH", "x").unwrap(), Config::default());
    }

    #[test]
    fn bad_values_name_the_variable_and_the_legal_ones() {
        for (k, v, needle) in [
            ("TILEWIRE_BACKEND", "cuda", "host, vmm, nccl, nvshmem"),
            ("TILEWIRE_TIMEOUT_S", "abc", "not a number"),
            ("TILEWIRE_TIMEOUT_S", "0", "more than 0"),
            ("TILEWIRE_TIMEOUT_S", "inf", "more than 0"),
            ("TILEWIRE_CACHE_DIR", "", "is empty"),
            ("TILEWIRE_SECRET", "short", "32 hexadecimal"),
            ("TILEWIRE_BACKED", "host", "TILEWIRE_BACKEND"),
        ] {
            let e = parse(k, v).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Config);
            assert!(e.to_string().contains(needle) && e.to_string().contains(k), "{e}");
        }
    }

    /// A change of a default must be a decision: it shows up here and in the changelog.
    #[test]
    fn the_secret_is_not_printed() {
        let c = Config { secret: Some("0123456789abcdef".repeat(2)), ..Config::default() };
        let text = format!("{c:?}");
        assert!(text.contains("hidden") && !text.contains("0123456789"), "{text}");
    }

    #[test]
    fn defaults_are_golden() {
        let c = Config::default();
        assert_eq!(
            format!("{c:?}"),
            "Config { backend: Host, timeout: None, cache_dir: None, log: Warn, jit: Auto, \
             secret: None, place: None }"
        );
    }
}
