//! `tilewire doctor`: what works here, and what to do about what does not.

mod gpu;

use std::path::Path;

use serde::Serialize;
use tilewire::boot::NO_MULTICAST;
use tilewire::device::cuda::{
    CUBLASLT, LIBRARIES, LibrarySpec, NCCL, NVRTC, NVSHMEM, NVTX, NcclComm, Nvrtc, Nvshmem, Places,
    load_cublaslt, load_nvrtc, usable,
};
use tilewire::device::jit::{Cache, Compiler, KernelSpec};
use tilewire::prelude::*;
use tilewire::symm::backends;

use crate::args::DoctorArgs;
use crate::say;

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As it should be.
    Ok,
    /// Works, but not as well as it could.
    Warn,
    /// Does not work.
    Fail,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Stable name.
    pub code: &'static str,
    /// The severity.
    pub state: State,
    /// The finding, as text.
    pub text: String,
    /// The remedy, if something is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

fn finding(code: &'static str, state: State, text: impl Into<String>, remedy: &str) -> Finding {
    let remedy = (!remedy.is_empty()).then(|| remedy.to_owned());
    Finding { code, state, text: text.into(), remedy }
}

/// Looks at everything. Never fails: what cannot be looked at is a finding.
pub fn examine(shm: &Path) -> Vec<Finding> {
    let mut v =
        vec![environment(), place(), cores(), descriptors(), leftovers(shm), host_backend()];
    // As another program would find them: a look at the backends loads some.
    let places = Places::of_process();
    v.extend(backends().into_iter().filter(|b| b.kind != BackendKind::Host).map(|b| {
        let text = format!("backend {}: {}", b.kind, b.why_not.as_deref().unwrap_or("available"));
        let state = if b.why_not.is_some() { State::Warn } else { State::Ok };
        let driver = usable().err();
        let remedy = driver.as_ref().filter(|_| b.kind == BackendKind::Vmm);
        let remedy = remedy.and_then(|e| e.get_hint());
        finding("backend", state, text, remedy.unwrap_or("the `host` backend runs everywhere"))
    }));
    v.extend(gpu::examine());
    v.extend(LIBRARIES.iter().map(|l| library(&places, l)));
    v.push(kernel_cache());
    v.extend(shared_memory(shm));
    v
}

/// Reports the source of a library for GPUs, and whether it opens: a file of that name may be no
/// library.
fn library(places: &Places, spec: &LibrarySpec) -> Finding {
    match places.find_or_older(spec, None) {
        Ok((_, f)) => match open(spec) {
            Ok(version) => {
                let version = version.map(|v| format!("{v} at ")).unwrap_or_default();
                let text = format!("{}: {version}{} ({})", spec.name, f.path.display(), f.how);
                finding("library", State::Ok, text, "")
            }
            Err(e) => {
                let state =
                    if lacks_variable(&e) || is_old(spec, &e) { State::Warn } else { State::Fail };
                let text = format!("{}: {}", spec.name, e.message());
                finding("library", state, text, e.get_hint().unwrap_or(spec.install))
            }
        },
        Err(e) if e.is_unavailable() => {
            let text = format!("{}: no {} (needed {})", spec.name, spec.soname, needed_for(spec));
            finding("library", State::Warn, text, spec.install)
        }
        Err(e) => finding(
            "library",
            State::Fail,
            e.message().to_owned(),
            e.get_hint().unwrap_or("see the error"),
        ),
    }
}

/// Returns what is not there without it.
fn needed_for(spec: &LibrarySpec) -> &'static str {
    match spec.name {
        n if n == NVTX.name => "for ranges in a profiler only",
        n if n == NVRTC.name => "on GPUs only, to compile kernels",
        n if n == CUBLASLT.name => "on GPUs only, for faster products",
        n if n == NCCL.name || n == NVSHMEM.name => "on GPUs only, for what goes through it",
        _ => "by nothing here; copies that would mix are reported",
    }
}

/// Opens those whose functions are called; the version, of those that are asked for it.
fn open(spec: &LibrarySpec) -> Result<Option<String>> {
    match spec.name {
        n if n == NVRTC.name => load_nvrtc(None).and_then(|_| compiles()).map(Some),
        n if n == CUBLASLT.name => load_cublaslt(None).map(|_| None),
        n if n == NCCL.name => NcclComm::library().map(|(version, _)| Some(version)),
        n if n == NVSHMEM.name => Nvshmem::library().map(|(version, _)| Some(version)),
        _ => Ok(None),
    }
}

/// Does it: NVRTC opens a second library when it compiles, and does not say before that it is
/// missing.
fn compiles() -> Result<String> {
    let text = "extern \"C\" __global__ void tw_doctor() {}".to_owned();
    let (name, arch) = ("doctor.cu".to_owned(), "sm_80".to_owned());
    Nvrtc.compile(&KernelSpec { name, text, defines: Vec::new(), arch })?;
    Nvrtc.version()
}

/// Nothing is wrong with a library that is not opened as long as it may use multicast, or register
/// memory of captured calls.
fn lacks_variable(e: &Error) -> bool {
    let hint = e.get_hint().unwrap_or_default();
    let all = NO_MULTICAST.into_iter().chain([("NCCL_GRAPH_REGISTER", "0")]);
    all.into_iter().any(|(name, want)| hint.contains(&format!("{name}={want}")))
}

/// Nor with one of a backend that nobody has to use, which opens and is of another version.
fn is_old(spec: &LibrarySpec, e: &Error) -> bool {
    let optional = [NCCL.name, NVSHMEM.name].contains(&spec.name);
    optional && !e.is_mismatch() && !e.message().contains("cannot be loaded")
}

fn kernel_cache() -> Finding {
    let Ok(config) = Config::from_env() else {
        let text = "kernel cache: not looked at, as a variable is wrong".to_owned();
        return finding("kernel-cache", State::Warn, text, "mend the variable that is named here");
    };
    let cache = Cache::open(config.cache_dir.as_deref());
    match cache.and_then(|c| Ok((c.usage()?, c))) {
        Ok((u, c)) => {
            let dir = c.dir().display();
            let text = format!("kernel cache: {} kernels, {} bytes in {dir}", u.entries, u.bytes);
            finding("kernel-cache", State::Ok, text, "")
        }
        Err(e) => finding(
            "kernel-cache",
            State::Warn,
            format!("kernel cache: {}", e.message()),
            "set TILEWIRE_CACHE_DIR to a folder that only you may write",
        ),
    }
}

fn environment() -> Finding {
    match Config::from_env() {
        Ok(c) => finding(
            "env",
            State::Ok,
            match c.timeout {
                Some(t) => format!("environment: backend {}, timeout {t:?}", c.backend),
                None => format!("environment: backend {}, timeouts as commands say", c.backend),
            },
            "",
        ),
        Err(e) => finding(
            "env",
            State::Fail,
            e.message().to_owned(),
            "correct or unset that variable; `tilewire env` lists them",
        ),
    }
}

fn place() -> Finding {
    match crate::worlds::place(&Default::default()) {
        Ok(p) => finding(
            "launcher",
            State::Ok,
            format!("launcher: {:?}, rank {} of {}", p.launcher, p.rank.get(), p.size),
            "",
        ),
        Err(e) => finding(
            "launcher",
            State::Fail,
            e.message().to_owned(),
            e.get_hint().unwrap_or("check the launcher's variables"),
        ),
    }
}

fn cores() -> Finding {
    match std::thread::available_parallelism() {
        Ok(n) => finding("cores", State::Ok, format!("cores: {n}"), ""),
        Err(e) => {
            finding("cores", State::Warn, format!("number of cores unknown: {e}"), "nothing to do")
        }
    }
}

/// Each pair of ranks takes a few descriptors while a heap is made.
fn descriptors() -> Finding {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let soft = limits
        .lines()
        .find(|l| l.starts_with("Max open files"))
        .and_then(|l| l.split_whitespace().nth(3))
        .and_then(|w| w.parse::<u64>().ok());
    match soft {
        Some(n) if n >= 1024 => finding("open-files", State::Ok, format!("open files: {n}"), ""),
        Some(n) => {
            finding("open-files", State::Warn, format!("open files: only {n}"), "ulimit -n 4096")
        }
        None => finding("open-files", State::Warn, "limit of open files unknown", "needs /proc"),
    }
}

/// Returns what a folder's file system has left, in MiB.
fn free_mib(folder: &Path) -> Option<u64> {
    let s = rustix::fs::statvfs(folder).ok()?;
    Some(s.f_bavail.saturating_mul(s.f_frsize) >> 20)
}

/// NCCL's ranks of one host meet there, each with a few MiB.
fn shared_memory(shm: &Path) -> Option<Finding> {
    let free = free_mib(shm)?;
    let text = format!("{}: {free} MiB are free", shm.display());
    let remedy = "NCCL may need more: in a container, start it with `--shm-size=1g`";
    Some(finding("shm", if free < 32 { State::Warn } else { State::Ok }, text, remedy))
}

/// tilewire itself leaves nothing there (its memory has no name), others do.
fn leftovers(shm: &Path) -> Finding {
    let Ok(dir) = std::fs::read_dir(shm) else {
        return finding(
            "shm",
            State::Ok,
            format!("{}: not there: NCCL wants it, tilewire itself does not", shm.display()),
            "",
        );
    };
    let names: Vec<String> = dir
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|n| ["tilewire", "nccl-", "nvshmem", "torch_"].iter().any(|p| n.starts_with(p)))
        .collect();
    if names.is_empty() {
        return finding(
            "shm",
            State::Ok,
            format!("{}: no leftovers of crashed jobs", shm.display()),
            "",
        );
    }
    let text = format!("{}: {} leftovers, e.g. {}", shm.display(), names.len(), names[0]);
    finding("shm", State::Warn, text, "remove them if no job of theirs is running")
}

/// Does it, rather than asking whether it could be done.
fn host_backend() -> Finding {
    let done = World::run_threads(2, WorldCfg::for_tests(), |w| {
        let team = w.everyone("doctor")?;
        let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
        heap.alloc(4096, "probe").map(|_| ())
    });
    match done {
        Ok(_) => finding(
            "host",
            State::Ok,
            "backend host: two ranks shared memory and formed a team",
            "",
        ),
        Err(e) => finding(
            "host",
            State::Fail,
            format!("backend host: {e}"),
            e.get_hint().unwrap_or("see the error"),
        ),
    }
}

/// Prints the report; the exit code is 1 if anything fails.
pub fn run(args: &DoctorArgs) -> i32 {
    let findings = examine(&args.shm);
    if args.json {
        if let Ok(text) = serde_json::to_string_pretty(&findings) {
            say(text);
        }
    } else {
        for f in &findings {
            let mark = match f.state {
                State::Ok => "ok  ",
                State::Warn => "warn",
                State::Fail => "FAIL",
            };
            say(format_args!("{mark} {}", f.text));
            if let Some(r) = f.remedy.as_ref().filter(|_| f.state != State::Ok) {
                say(format_args!("       -> {r}"));
            }
        }
    }
    i32::from(findings.iter().any(|f| f.state == State::Fail))
}
