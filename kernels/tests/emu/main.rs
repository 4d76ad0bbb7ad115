//! The kernels' text, executed on the CPU by the emulator in `kernels/emu`.
//!
//! A harness of its own, because the compiler that this needs may be missing: then the whole set is
//! one ignored test with its reason, which `cargo xtask test` counts as skipped.
#![expect(clippy::print_stdout, reason = "a test harness reports on stdout, as libtest does")]

mod apart;
mod attention;
mod attention_builds;
mod attention_fwd;
mod attention_grad;
mod attention_hopper;
mod attention_hopper_fp8;
mod attention_hopper_fused;
mod attention_hopper_fused_mutants;
mod attention_hopper_gates;
mod attention_hopper_gates_mutants;
mod attention_hopper_grad;
mod attention_hopper_grad_mutants;
mod attention_hopper_mutants;
mod attention_mutants;
mod attention_sequences;
mod attention_split;
mod bulk_copies;
mod collective;
mod collective_kernels;
mod collective_mutants;
mod compile;
mod convert;
mod dequant;
mod ep;
mod ep_away;
mod ep_batch;
mod ep_layers;
mod ep_mutants;
mod ep_return_mutants;
mod ep_straight;
mod ep_world;
mod ep_worlds;
mod ep_worlds_mutants;
mod gemm;
mod gemm_aux;
mod gemm_mutants;
mod grouped;
mod grouped_grad;
mod hopper;
mod hopper_grouped;
mod hopper_mutants;
mod hopper_skinny;
mod host;
mod layers;
mod layers_mutants;
mod layers_router;
mod layouts;
mod links;
mod litmus;
mod memory;
mod mutants;
mod optimizer;
mod orders;
mod permute;
mod planted;
mod probes;
mod quant;
mod reduce;
mod run;
mod signal;
mod team;
mod wgmma;

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

type Test = (&'static str, fn());

/// Tests by their names.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name as fn())),*] };
}

/// Name of the threads of tests. On others a panic is what a test expects.
const LOUD: &str = "test";

/// The tests of all modules.
fn all_tests() -> Vec<Test> {
    [
        layouts::TESTS,
        planted::TESTS,
        probes::TESTS,
        bulk_copies::TESTS,
        signal::TESTS,
        orders::TESTS,
        mutants::TESTS,
        gemm::TESTS,
        gemm_aux::TESTS,
        gemm_mutants::TESTS,
        wgmma::TESTS,
        hopper::TESTS,
        hopper_grouped::TESTS,
        hopper_mutants::TESTS,
        hopper_skinny::TESTS,
        grouped::TESTS,
        grouped_grad::TESTS,
        convert::TESTS,
        quant::TESTS,
        dequant::TESTS,
        permute::TESTS,
        attention_fwd::TESTS,
        attention_grad::TESTS,
        attention_hopper::TESTS,
        attention_hopper_fp8::TESTS,
        attention_hopper_fused::TESTS,
        attention_hopper_fused_mutants::TESTS,
        attention_hopper_gates::TESTS,
        attention_hopper_gates_mutants::TESTS,
        attention_hopper_grad::TESTS,
        attention_hopper_grad_mutants::TESTS,
        attention_hopper_mutants::TESTS,
        attention_mutants::TESTS,
        attention_sequences::TESTS,
        attention_split::TESTS,
        reduce::TESTS,
        collective::TESTS,
        collective_kernels::TESTS,
        collective_mutants::TESTS,
        ep::TESTS,
        ep_away::TESTS,
        ep_straight::TESTS,
        ep_worlds::TESTS,
        ep_worlds_mutants::TESTS,
        ep_return_mutants::TESTS,
        ep_mutants::TESTS,
        layers::TESTS,
        optimizer::TESTS,
        links::TESTS,
        litmus::TESTS,
    ]
    .concat()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted: Vec<&String> = args.iter().filter(|a| !a.starts_with('-')).collect();
    let all = all_tests();
    let chosen: Vec<Test> = all
        .iter()
        .filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str())))
        .copied()
        .collect();
    if args.iter().any(|a| a == "--list") {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    if apart::is_child() {
        return child(&all, &args);
    }
    println!("\nrunning {} tests", chosen.len());
    if let Err(why) = compile::available() {
        println!("test kernels_on_the_cpu ... ignored, {why}");
        println!("\ntest result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out");
        return ExitCode::SUCCESS;
    }
    panic::set_hook(Box::new(|info| {
        if thread::current().name() == Some(LOUD) {
            println!("{info}");
            if let Some(compile::Refused(why)) = info.payload().downcast_ref() {
                println!("{why}");
            }
        }
    }));
    let start = Instant::now();
    let failed = run(&chosen);
    compile::clean();
    if let Some((own, compilers)) = processor_time() {
        println!("{own:.0} s of a processor in tests, {compilers:.0} s in compilers and mutants");
    }
    for name in &failed {
        println!("    {name}");
    }
    println!(
        "\ntest result: {}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s",
        if failed.is_empty() { "ok" } else { "FAILED" },
        chosen.len() - failed.len(),
        failed.len(),
        all.len() - chosen.len(),
        start.elapsed().as_secs_f64()
    );
    ExitCode::from(u8::from(!failed.is_empty()))
}

/// Runs the test of one mutant, which ends the process; that it comes back is a failure.
fn child(all: &[Test], args: &[String]) -> ExitCode {
    // Panics are what a mutant is to cause.
    panic::set_hook(Box::new(|_| ()));
    for (_, test) in all.iter().filter(|(name, _)| args.iter().any(|a| a == name)) {
        test();
    }
    ExitCode::FAILURE
}

/// Seconds of a processor that this process took, and those of its children that have ended.
fn processor_time() -> Option<(f64, f64)> {
    // Behind the name, which may have spaces: the eleventh number is of this process in its own
    // code, then in the kernel's, then both of its children. A tick is 10 ms on every Linux.
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let numbers = text.rsplit(')').next()?.split_whitespace().skip(11).take(4);
    let ticks: Vec<f64> = numbers.map(|n| n.parse().ok()).collect::<Option<_>>()?;
    match ticks[..] {
        [own, system, compilers, of_compilers] => {
            Some(((own + system) / 100.0, (compilers + of_compilers) / 100.0))
        }
        _ => None,
    }
}

/// Runs the tests on all processors; the names of those that failed.
fn run(tests: &[Test]) -> Vec<&'static str> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((name, test)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            apart::begin(name);
            let good = panic::catch_unwind(AssertUnwindSafe(test)).is_ok();
            let word = if good { "ok" } else { "FAILED" };
            println!("test {name} ({:.2} s) ... {word}", start.elapsed().as_secs_f64());
            if !good {
                failed.lock().unwrap().push(*name);
            }
        }
    };
    let num = thread::available_parallelism().map_or(1, |n| n.get().min(8));
    thread::scope(|s| {
        for _ in 0..num {
            thread::Builder::new().name(LOUD.to_owned()).spawn_scoped(s, work).unwrap();
        }
    });
    failed.into_inner().unwrap()
}
