//! The program on GPUs where there are none: `verify` and `train` with `--backend vmm`, on a driver
//! whose devices run the text of every kernel on the CPU (`kernels/emu/driver`). Everything but
//! machine code and hardware is what runs on GPUs, with as many devices as a test asks for, and as
//! an A100 would choose its kernels, too.

#![expect(clippy::print_stdout, reason = "how long each run took")]

#[path = "../../ops/tests/gpu/driver.rs"]
mod driver;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use driver::Driver;
use serde_json::Value;
use tilewire_testing::{Lack, did_not_run};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tilewire");
const MOVES: &str = "all_gather,reduce_scatter,all_reduce,all_to_all";
const FUSED: &str = "ag_gemm,gemm_rs,gemm_ar";
const ALONE: &str = "quant,permute";

/// Operations, ranks (of at most so many devices), compute capability, types (all where empty), and
/// how many cases that makes.
type Run = (&'static str, &'static str, usize, u32, &'static str, usize);

/// Attention on four ranks, by the kernel of sm_90: heads traded in two groups beside rings of two,
/// with every layout; a ring that passes on more than one message; each other strategy once.
const FOUR: &str = "cp_attention/hybrid/zigzag/full+dims+sink,cp_attention/hybrid/zigzag/causal+gqa+kv8,\
    cp_attention/hybrid/contiguous/causal+gqa,\
    cp_attention/hybrid/zigzag_per_sequence/window+padded+softcap+sink,\
    cp_attention/hybrid/balanced/window+padded+softcap+sink,cp_attention/ring/zigzag/causal+gqa+kv8,\
    cp_attention/ring/balanced/window+padded+softcap+sink,cp_attention/get/contiguous/causal+gqa,\
    cp_attention/all_gather/zigzag/full+dims+sink,\
    cp_attention/all_to_all/zigzag_per_sequence/window+padded+softcap+sink";

/// Attention whose tiles wait for their keys; by offsets of several documents, too.
const GATED: &str = "cp_attention/gated/zigzag/causal+gqa/hopper,cp_attention/gated/zigzag/causal+gqa+tiny/hopper,\
    cp_attention/gated/contiguous/window+padded+softcap/hopper,\
    cp_attention/gated/balanced/window+padded+softcap+sink/hopper";

/// Strategies, and layouts with features of f32: each of these by two of the strategies, each
/// strategy with four to six of these. All pairs are tried on the host (`conformance.rs`): what a
/// strategy sends does not depend on what its kernels mask.
const STRATEGIES: [&str; 5] = ["get", "ring", "all_gather", "all_to_all", "hybrid"];
const FEATURES: [&str; 12] = [
    "zigzag/causal+gqa",
    "contiguous/causal+mqa+packed+dropout",
    "zigzag/window+packed+bias",
    "contiguous/full+cross+bias1+dropout",
    "zigzag/causal+masked+sink",
    "zigzag/causal+mqa+kv8+dkv8",
    "contiguous/window+dkv5",
    "zigzag_per_sequence/causal+gqa+packed",
    "zigzag_per_sequence/causal+mqa+cross+bias+dropout",
    "zigzag_per_sequence/causal+gqa+packed+kv8+dkv8",
    "balanced/causal+gqa+packed",
    "balanced/causal+mqa+cross+bias+dropout",
];

/// Those pairs; shards that are empty, by every strategy; and the strategy that is chosen.
fn pairs() -> String {
    let mut all = vec!["cp_attention/auto/zigzag/causal".to_owned()];
    for (i, strategy) in STRATEGIES.iter().enumerate() {
        all.push(format!("cp_attention/{strategy}/zigzag/causal+gqa+tiny"));
        let of = FEATURES.iter().enumerate().filter(|(k, _)| (k + 5 - i) % 5 < 2);
        all.extend(of.map(|(_, features)| format!("cp_attention/{strategy}/{features}")));
    }
    all.join(",")
}

/// In place of [`pairs`], in [`RUNS`].
const PAIRS: &str = "pairs of cp_attention";

/// What differs: a peer and no peer between, an odd number, as many as a machine has; each of both
/// attention kernels, by type; and sm_80 where it has kernels of its own, which are those of moves
/// (and of `ep`, which [`MORE_RUNS`] have). The types of moves, which differ in the text of their
/// sums, on two and three devices. Longest first.
const RUNS: [Run; 13] = [
    (FOUR, "4", 4, 90, "bf16", 10),
    (MOVES, "2,3", 3, 90, "", 2 * 51),
    (MOVES, "8", 8, 90, "bf16", 15),
    (PAIRS, "2", 2, 90, "f32", 30),
    ("ep,bulk", "2,3", 3, 90, "", 2 * 27),
    (GATED, "3", 3, 90, "", 4),
    ("grouped_gemm", "1", 1, 90, "", 17),
    (FUSED, "2", 2, 90, "", 18),
    ("attention", "1", 1, 90, "", 53),
    (MOVES, "3", 3, 80, "", 51),
    // Two ranks to a device.
    (MOVES, "4", 2, 90, "bf16", 15),
    ("gemm", "1", 1, 90, "", 52),
    (ALONE, "1", 1, 90, "", 69),
];

/// `cargo xtask test --full`: `ep` on eight devices, whose threads take turns for minutes (its
/// kernels meet on eight ranks in `kernels/tests/emu/ep_worlds.rs`, too); the numbers of ranks
/// between those above; types that the same kernels compute; and what sm_80 computes by the kernels
/// that sm_90 has, too.
const MORE_RUNS: [Run; 12] = [
    ("cp_attention", "4", 4, 90, "", 126),
    ("ep", "8", 8, 90, "", 25),
    (MOVES, "1,4,5,6,7,8", 8, 90, "", 6 * 51),
    ("cp_attention", "2", 2, 90, "", 126),
    ("ep,bulk", "1,4", 4, 90, "", 2 * 27),
    (FUSED, "4", 4, 90, "", 18),
    (MOVES, "1,2,4", 4, 80, "", 3 * 51),
    (MOVES, "4", 2, 90, "", 51),
    ("ep", "2", 2, 80, "", 25),
    ("ep", "3", 3, 80, "", 25),
    (FUSED, "2", 2, 80, "", 18),
    // Rows with gates are not of this backend.
    ("cp_attention", "2", 2, 80, "", 116),
];

/// Whether all of it was asked for.
fn all_of_it() -> bool {
    std::env::var_os("TW_FULL").is_some()
}

/// One test at a time: each takes all processors.
static ALL: Mutex<()> = Mutex::new(());

/// Runs `command` and says how long it took; its standard output.
fn run(mut command: Command, name: &str) -> String {
    let begun = Instant::now();
    // Peers wait while a kernel is compiled, beside all other tests, for longer than on GPUs.
    let out = command.env("TILEWIRE_TIMEOUT_S", "600").output().unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    // Rows that are wrong come last: of a long message the end is kept.
    let errors: Vec<_> = errors.lines().filter(|l| !l.ends_with("so far")).collect();
    assert!(out.status.success(), "{name}: {:?}\n{}\n{said}", out.status, errors.join("\n"));
    println!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
    said.into_owned()
}

#[test]
fn operations_are_right_on_emulated_devices() {
    let _one = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let verify = ["verify", "--backend", "vmm", "--quiet", "--op"];
    let more = MORE_RUNS.iter().filter(|_| all_of_it());
    let runs: Vec<&Run> = RUNS.iter().chain(more).collect();
    // Two at a time: what one device does is one thread's work, and the others wait for it.
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&&(ops, ranks, devices, sm, dtypes, cases)) =
            runs.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let mut command = driver.command(PROGRAM, devices);
            let which = if ops == PAIRS { pairs() } else { ops.to_owned() };
            command.env("TW_EMU_SM", sm.to_string()).args(verify).args([&*which, "--ranks", ranks]);
            if !dtypes.is_empty() {
                command.args(["--dtype", dtypes]);
            }
            let shown = if ops == FOUR { "cases of cp_attention" } else { ops };
            let name = format!("{shown} {dtypes}: {ranks} ranks, {devices} devices, sm_{sm}");
            let said = run(command, &name);
            assert!(said.contains(&format!("{cases} of {cases} cases right")), "{name}: {said}");
        }
    };
    std::thread::scope(|t| {
        t.spawn(work);
        work();
    });
    // The heap is as large as the sizes ask for.
    let mut command = driver.command(PROGRAM, 4);
    command.args(verify).args(["ep/zero_copy,ep/zero_copy_rank", "--dtype", "bf16"]);
    let tokens = if all_of_it() { 131 } else { 31 };
    let shape = format!("tokens={tokens},experts=61,hidden=528,top_k=5");
    command.args(["--ranks", "4", "--shape", &shape]);
    let said = run(command, "ep: other sizes");
    assert!(said.contains("2 of 2 cases right"), "{said}");
    // Processes share memory by its descriptors.
    let mut command = driver.command(PROGRAM, 3);
    command.args(["run", "-n", "3", "--", PROGRAM]).args(verify).arg(format!("{MOVES},ep"));
    let said = run(command, "processes");
    assert!(said.contains("76 of 76 cases right"), "{said}");
}

/// The losses of three steps of a small model on so many devices.
fn losses(driver: &Driver, devices: usize, grid: &str) -> Vec<f64> {
    losses_in(tempfile::tempdir().unwrap().path(), driver, devices, &format!("--steps 3 {grid}"))
}

fn losses_in(dir: &Path, driver: &Driver, devices: usize, grid: &str) -> Vec<f64> {
    let metrics = dir.join("steps.jsonl");
    std::fs::remove_file(&metrics).ok();
    let model = "train --task copy --seed 3 --layers 1 --d-model 64 --heads 2 --kv-heads 2 --head-dim 32 --experts 4 \
                 --d-ff 64 --seq 64 --batch 4 --dtype bf16";
    let mut command = driver.command(PROGRAM, devices);
    command.current_dir(dir);
    command.args(model.split_whitespace()).args(grid.split(' ')).arg("--metrics").arg(&metrics);
    run(command, &format!("train {grid}"));
    let text = std::fs::read_to_string(&metrics).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

#[test]
fn a_model_learns_on_emulated_devices_as_on_the_host() {
    let _one = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let host = losses(&driver, 0, "--backend host");
    assert!(host.len() == 3 && host[2] < host[0], "{host:?}");
    for (devices, grid) in [
        (1, "--backend vmm"),
        (2, "--backend vmm --ranks 2 --dp 2"),
        (4, "--backend vmm --ranks 4 --tp 2 --cp 2"),
    ] {
        let there = losses(&driver, devices, grid);
        let near = there.len() == 3 && host.iter().zip(&there).all(|(a, b)| (a - b).abs() < 2e-3);
        assert!(near, "{grid}: {there:?} and not {host:?}");
    }
}

/// Device memory is read and written by blocks; masters of bf16 weights are what is kept.
#[test]
fn a_checkpoint_of_devices_goes_on_exactly_and_on_any_grid() {
    let _one = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let dir = tempfile::tempdir().unwrap();
    let run = |devices, words: &str| losses_in(dir.path(), &driver, devices, words);
    let two = "--backend vmm --ranks 2 --tp 2";
    let whole = run(2, &format!("--steps 3 {two}"));
    run(2, &format!("--steps 2 --checkpoint c {two}"));
    let rest = run(2, &format!("--steps 3 --resume c {two}"));
    assert_eq!(rest, whole[2..], "bit for bit on the same grid");
    for (devices, words) in [(1, "--backend vmm"), (0, "--backend host --ranks 3 --cp 3")] {
        let other = run(devices, &format!("--steps 3 --resume c {words}"));
        assert!(other.len() == 1 && (other[0] - whole[2]).abs() < 2e-3, "{words}: {other:?}");
    }
}

/// What `bench` times against memory traffic: captured, replayed, and judged by the last replay;
/// and all ways of an operation in turn, beside the product and the transfers alone.
#[test]
fn what_moves_is_timed_on_emulated_devices() {
    let _one = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let ops = "quant,permute,bulk,embed,norm,heads,router,cross_entropy,optimizer,ag_gemm,gemm_rs,\
               gemm_ar";
    let sizes = "--m 24 --n 32 --k 8 --tokens 9 --hidden 16 --experts 6 --top-k 2 --align 2 --iters 1 --warmup 0";
    let mut command = driver.command(PROGRAM, 2);
    command.args(["bench", "--json", "--backend", "vmm", "--ranks", "2", "--dtype", "bf16"]);
    command.args(["--op", ops]).args(sizes.split(' '));
    let said = run(command, "bench");
    let rows: Vec<Value> = said.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(rows.len(), 51, "{said}");
    for r in &rows {
        assert!(r["wrong"] == 0 && r["t_ours_us"].as_f64().unwrap() > 0.0, "{r}");
        assert!(r["backend"] == "vmm" && r["max_err"].is_number(), "{r}");
        let op = r["op"].as_str().unwrap();
        if ["ag_gemm", "gemm_rs", "gemm_ar"].iter().any(|o| op.starts_with(o)) {
            assert!(["t_gemm_us", "t_comm_us"].iter().all(|t| r[t].as_f64() > Some(0.0)), "{r}");
        }
    }
}

/// Behind a fault each call of a driver returns it. Devices whose process gets no memory for their
/// threads have one: at the first kernel under the lower limits, later under the others.
#[test]
fn devices_that_fail_end_a_job_with_the_error() {
    let _one = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(driver) = Driver::emulated() else {
        return did_not_run(Lack::Compiler, "it needs g++");
    };
    let model = "train --ranks 2 --steps 2 --task copy --seq 16 --batch 24 --d-model 32 --head-dim 16 --d-ff 32";
    for limit in (400_000..=1_600_000).step_by(200_000) {
        let mut command = driver.command("/bin/sh", 2);
        let script = format!("ulimit -v {limit}; exec \"$0\" {model} --backend vmm");
        let out = command.args(["-c", &script, PROGRAM]).output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{limit}: {}: {text}", out.status);
        let fault = text.contains("error: ") && text.contains("the emulated driver says 2");
        assert!(fault && !text.contains("panicked"), "{limit}: {text}");
    }
}
