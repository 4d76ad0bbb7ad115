//! Runs the one-sided conformance cases on two GPUs through the same trait as the host backend,
//! then times them. One line per check; exit code 1 if one failed.
//!
//! `symm_checks [part of a name]` runs the checks whose name contains it: one check to a process,
//! in a shell loop, keeps a device error from spoiling the rest. Needs two GPUs that reach each
//! other's memory, a driver, and NVRTC. With one GPU both ranks share it, which proves nothing
//! about ordering, and frees may stall. Under `tilewire run -n 2 -- symm_checks` the ranks are
//! processes, and `symm_checks nvshmem` and `symm_checks nccl` run the cases on that backend.
//! `symm_checks litmus` is `litmus.rs`.
#![allow(clippy::print_stdout, missing_docs)]

#[path = "../../tests/cases/mod.rs"]
mod cases;
mod litmus;
mod time;

use std::time::{Duration, Instant};

use tilewire_boot::{Flags, detect, join_processes};
use tilewire_core::{Config, Deadline, Result};
use tilewire_device::cuda::{CudaContext, NcclComm, available, device_count, driver_version};
use tilewire_symm::{World, WorldCfg};

use cases::{Backend, Nccl, Nvshmem, Vmm};

/// Every wait of the spike gives up after this.
const TIMEOUT: Duration = Duration::from_secs(2);
const RANKS: usize = 2;

fn run<R: Send>(timeout: Duration, f: impl Fn(World) -> Result<R> + Sync) -> Result<Vec<R>> {
    // NVSHMEM takes its time to meet.
    let rendezvous_timeout = Duration::from_secs(20);
    let cfg = WorldCfg { timeout, rendezvous_timeout, ..WorldCfg::for_tests() };
    let vars = std::env::vars().collect();
    let place = detect(&Flags::of_process(), &vars)?;
    if place.size == 1 {
        return World::run_threads(RANKS, cfg, f);
    }
    // A process for each rank: each check is a new meeting.
    let mesh = join_processes(&place, &Config::from_env()?, Deadline::after_s(20.0))?;
    f(World::join(mesh, cfg)).map(|r| vec![r])
}

/// True if the check was asked for: by no argument, or by a part of its name.
fn wanted(name: &str) -> bool {
    let mut parts = std::env::args().skip(1).peekable();
    parts.peek().is_none() || parts.any(|part| name.contains(&part))
}

/// What an argument may be a part of.
fn names() -> Vec<&'static str> {
    let cases = suite::<Vmm>().map(|(name, _)| name);
    let timed = time::ALL.map(|(name, _)| name);
    ["rendezvous"].into_iter().chain(cases).chain(timed).collect()
}

type Case = fn(World) -> Result<()>;

/// The one-sided conformance cases.
fn suite<B: Backend>() -> [(&'static str, Case); 9] {
    [
        ("put_signal_wait", cases::put_signal_wait::<B>),
        ("put_flag", cases::put_flag::<B>),
        ("get_after_signal", cases::get_after_signal::<B>),
        ("barrier", cases::barrier::<B>),
        ("graph_replay", cases::graph_replay::<B>),
        ("growth", cases::growth::<B>),
        ("timeout_and_reform", cases::timeout_and_reform::<B>),
        ("abort_and_reform", cases::abort_and_reform::<B>),
        ("put_signal_wait afterwards", cases::put_signal_wait::<B>),
    ]
}

/// Prints one line; true if it went well.
fn line(name: &str, f: impl FnOnce() -> Result<String>) -> bool {
    let start = Instant::now();
    let result = f();
    let ms = start.elapsed().as_secs_f64() * 1e3;
    match &result {
        Ok(text) => println!("ok      {name:<28} {ms:>8.1} ms  {text}"),
        Err(e) => println!("FAILED  {name:<28} {ms:>8.1} ms  {e}"),
    }
    result.is_ok()
}

fn describe() -> Result<String> {
    available()?;
    let n = device_count()?;
    let v = driver_version()?;
    let ctx = CudaContext::new(0)?;
    let reach = n < 2 || ctx.can_access(1)?;
    Ok(format!(
        "{n} x {} ({}), driver supports CUDA {}.{}, peer access {reach}",
        ctx.name()?,
        ctx.arch()?,
        v / 1000,
        v % 1000 / 10
    ))
}

/// Nothing of this program takes a minute: if it does, something hangs.
fn watchdog() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(55));
        println!("FAILED  watchdog: still running after 55 s");
        std::process::exit(3);
    });
}

fn main() {
    if std::env::args().nth(1).is_some_and(|a| a == "litmus") {
        return litmus::run_all(&std::env::args().nth(2).unwrap_or_default());
    }
    // Nothing that ran is no success.
    let backend = std::env::args().nth(1).is_some_and(|a| a == "nvshmem" || a == "nccl");
    if !backend && !names().into_iter().any(wanted) {
        let names = names().join("; ");
        println!("FAILED  no check has that in its name: {names}; or nvshmem, nccl, litmus");
        std::process::exit(2);
    }
    watchdog();
    if !line("machine", describe) {
        std::process::exit(2);
    }
    let case = |f: fn(World) -> Result<()>| run(TIMEOUT, f).map(|_| String::new());
    let mut good = true;
    let mut check = |name: &str, ok: bool| {
        good &= ok;
        if !ok {
            println!("        ^ {name} failed; the rest runs on new teams");
        }
    };
    if wanted("rendezvous") {
        // The first meeting waits for the last process to start; the second is the meeting itself.
        let meet = || run(TIMEOUT, |_| Ok(()));
        let timed = || {
            meet()?;
            let start = Instant::now();
            meet()?;
            Ok(format!("{:.1} ms to meet again", start.elapsed().as_secs_f64() * 1e3))
        };
        check("rendezvous", line("rendezvous", timed));
    }
    for (name, f) in suite::<Vmm>() {
        if wanted(name) {
            check(name, line(name, || case(f)));
        }
    }
    // NVSHMEM wants a process for each rank, which is for whoever starts this to see to.
    if std::env::args().nth(1).is_some_and(|a| a == "nvshmem") {
        for (name, f) in suite::<Nvshmem>() {
            check(name, line(&format!("nvshmem {name}"), || case(f)));
        }
    }
    if std::env::args().nth(1).is_some_and(|a| a == "nccl") {
        let library =
            || NcclComm::library().map(|(version, found)| format!("{version}, {}", found.how));
        check("library", line("nccl library", library));
        let own: [(&'static str, Case); 3] = [
            ("adopted", cases::nccl::adopted),
            ("adopted, calls wait", cases::nccl::adopted_waiting),
            ("host puts", cases::nccl::host_puts),
        ];
        for (name, f) in suite::<Nccl>().into_iter().chain(own) {
            check(name, line(&format!("nccl {name}"), || case(f)));
        }
    }
    for (name, f) in time::ALL {
        // It ends its process.
        if wanted(name) && (name != "killed" || std::env::args().nth(1).is_some()) {
            check(name, line(name, f));
        }
    }
    println!("{}", if good { "all ok" } else { "FAILED" });
    std::process::exit(i32::from(!good));
}
