//! Every compilation unit through NVRTC, for three architectures: nothing may spill.
//!
//! A harness of its own, because NVRTC may be missing: then it is one ignored test with its
//! reason, which `cargo xtask test` counts as skipped.
#![expect(clippy::print_stdout, reason = "a test harness reports on stdout, as libtest does")]

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use object::{Object, ObjectSection};
use tilewire_device::cuda::{Nvrtc, load_nvrtc};
use tilewire_device::jit::{Compiler, KernelSpec, kernel_uses};
use tilewire_kernels::attention::hopper::{
    HopperGrad, HopperVariant, SM90_ATTENTION, SM90_ATTENTION_BWD,
};
use tilewire_kernels::attention::hopper_fp8::SM90_ATTENTION_FP8;
use tilewire_kernels::attention::hopper_fused::SM90_ATTENTION_GRADS;
use tilewire_kernels::attention::hopper_gates::{HopperGated, SM90_ATTENTION_GATED};
use tilewire_kernels::portable::portable;
use tilewire_kernels::{ALL, Source};

const ARCHS: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];
/// Kernels of tests of the device layer alone, which need sm_90.
const INTEROP: Source = Source {
    name: "device/src/cuda/interop_tests.cu",
    defines: &[],
    kernels: &["test_cluster", "test_tile"],
};
const INTEROP_TEXT: &str = include_str!("../../crates/device/src/cuda/interop_tests.cu");

/// The text, and what holds the layouts of its parameters equal to the host's.
fn text_of(s: &Source) -> String {
    if s.name == INTEROP.name {
        return INTEROP_TEXT.to_owned();
    }
    s.text() + &s.layouts().map(|l| l.asserts()).collect::<String>()
}

fn is_of_hopper(s: &Source) -> bool {
    s.name != INTEROP.name && s.is_of_hopper()
}

fn runs_on(s: &Source, arch: &str) -> bool {
    if s.name == INTEROP.name { arch != "sm_80" } else { s.runs_on(arch) }
}

/// Where `cargo xtask` puts the pinned wheel.
const WHEEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/python-nvrtc/nvidia/cu13/lib");

const SMALL_F16: [(&str, u64); 4] =
    [("TW_GEMM_F16", 1), ("TW_GEMM_M", 64), ("TW_GEMM_N", 64), ("TW_GEMM_WARPS_N", 2)];

/// Units and definitions beside those of [`Source::defines`].
fn variants(s: &Source) -> Vec<Vec<(String, u64)>> {
    let all = tilewire_kernels::variants().into_iter().filter(|(p, _)| p.name == s.name);
    let listed: Vec<_> = all.map(|(_, defines)| defines).collect();
    if !listed.is_empty() {
        return listed;
    }
    let own: Vec<_> = s.defines.iter().map(|d| ((*d).to_owned(), 4096)).collect();
    let more: &[&[(&str, u64)]] = match s.name {
        "gemm/sm80_gemm.cu" => &[&[], &SMALL_F16],
        _ => &[&[]],
    };
    let with = |m: &&[(&str, u64)]| {
        own.iter().cloned().chain(m.iter().map(|(n, v)| ((*n).to_owned(), *v))).collect()
    };
    more.iter().map(with).collect()
}

/// Compiles one unit: what its kernels need, or what is wrong with it.
fn compile(s: &Source, defines: &[(String, u64)], arch: &str) -> Result<String, String> {
    let named: Vec<_> = defines.iter().map(|(n, v)| format!("{n}={v}")).collect();
    let spec = KernelSpec {
        name: s.name.into(),
        text: text_of(s),
        defines: defines.to_vec(),
        arch: arch.into(),
    };
    let start = Instant::now();
    let done = Nvrtc.compile(&spec).map_err(|e| e.to_string())?;
    let uses = kernel_uses(&done.log);
    let (named, took) = (named.join(" "), start.elapsed().as_secs_f64());
    let mut table = format!("{arch:<8} {} {named} ({took:.2} s)\n", s.name);
    for u in &uses {
        let (r, spill, smem) = (u.registers, u.spill_bytes, u.shared_bytes);
        let what = format!("{r:>3} registers {spill} B spilled {smem} B static shared");
        table += &format!("    {:<20} {what}\n", u.name);
        if spill > 0 || u.serialised {
            return Err(format!("{} for {arch}: {u:?}", s.name));
        }
    }
    if is_of_hopper(s) {
        table += &machine_code(s, defines, &done.cubin).map_err(|e| format!("{}: {e}", s.name))?;
    }
    let found = s.kernels.iter().all(|k| uses.iter().any(|u| u.name == *k));
    if found { Ok(table) } else { Err(format!("{}: not every kernel is there: {uses:?}", s.name)) }
}

/// Instructions of machine code for sm_90a, by the low 12 bits of their first word, as nvdisasm
/// 13.0 names them.
const HGMMA: u64 = 0x9f0;
/// HGMMA with A in registers.
const HGMMA_R: u64 = 0xdf0;
/// The same of FP8.
const QGMMA: u64 = 0x9f3;
const QGMMA_R: u64 = 0xdf3;
const USETMAXREG: u64 = 0x9c8;
const LDL: u64 = 0x983;
const STL: u64 = 0x387;
const MEMBAR: u64 = 0x992;
/// The scope of a MEMBAR, in its second word, if it is the whole GPU.
const OF_GPU: u64 = 0xa;

/// What is counted in the machine code of a kernel: products of two tiles in shared memory, and
/// with A in registers; registers given and taken; loads and stores of local memory; barriers that
/// wait for the whole GPU's memory.
type Counts = [usize; 5];

/// What must be in the machine code of kernel `name`.
fn expected(s: &Source, defines: &[(String, u64)], name: &str) -> Counts {
    const PLAIN: [&str; 5] = [
        "tw_attn_table",
        "tw_attn_delta",
        "tw_attn_dq_of_sums",
        "tw_attn_fp8_values",
        "tw_hopper_sum_parts",
    ];
    if PLAIN.contains(&name) {
        return [0; 5];
    }
    if s.name == SM90_ATTENTION_GRADS.name {
        // 128 elements of heads are eight products, 64 queries four, 128 keys eight. Those of dq
        // and dk stand in two places: in the loop, and for the last tile. Turns have an order:
        // acquired, fenced for copies, released behind them.
        let unordered = defines.iter().any(|(name, on)| name == "TW_HB_UNORDERED" && *on == 1);
        return [8 + 8 + 2 * 8, 4 + 2 * 4, 2, 0, if unordered { 0 } else { 3 }];
    }
    if s.name == SM90_ATTENTION_BWD.name {
        let all = HopperGrad::all();
        let v = all.iter().find(|v| v.defines() == defines).expect("a variant of the list");
        // Each product stands in one place: of scores and of the gradients of probabilities, then
        // those that make sums.
        return match name {
            "tw_hopper_attn_dq" => [(v.dqk + v.dv) / 16, v.keys.rows / 16, 2, 0, 0],
            "tw_hopper_attn_dkv" => [(v.dqk + v.dv) / 16, 2 * v.queries.rows / 16, 2, 0, 0],
            "tw_hopper_attn_dk" => [(v.dqk + v.dv) / 16, v.queries.rows / 16, 2, 0, 0],
            _ => [v.dqk / 16, v.queries.rows / 16, 2, 0, 0],
        };
    }
    if s.name == SM90_ATTENTION_GATED.name {
        let all = HopperGated::all();
        let v = all.iter().find(|v| v.defines() == defines).expect("a variant of the list");
        // As without gates. A loader fences behind a gate, in two places where it loads keys.
        return [3 * v.base.dqk / 16, 3 * v.keys() / 16, 2, 0, 2];
    }
    if s.name == SM90_ATTENTION_FP8.name {
        // 128 elements or keys are four products. Those of scores stand in three places, those of
        // values in the loop.
        return [3 * 4, 4, 2, 0, 0];
    }
    if s.name != SM90_ATTENTION.name {
        // 64 elements of k are four products. The barriers stand where the blocks of a cluster meet
        // and where the number of a tile is published, none in the loop over k.
        return [4, 0, 2, 0, 3];
    }
    let all = HopperVariant::all();
    let v = all.iter().find(|v| v.defines() == defines).expect("a variant of the list");
    // Each product stands in three places: first or last, in the loop, between two tiles.
    [3 * v.dqk / 16, 3 * v.keys() / 16, 2, 0, 0]
}

/// Counts the instructions of each kernel: they must be those that are expected.
fn machine_code(s: &Source, defines: &[(String, u64)], cubin: &[u8]) -> Result<String, String> {
    let file = object::File::parse(cubin).map_err(|e| e.to_string())?;
    let mut table = String::new();
    for section in file.sections() {
        let Some(name) = section.name().ok().and_then(|n| n.strip_prefix(".text.")) else {
            continue;
        };
        let code = section.data().map_err(|e| e.to_string())?;
        let words: Vec<u64> = code
            .chunks_exact(8)
            .map(|w| u64::from_le_bytes(std::array::from_fn(|i| w[i])))
            .collect();
        let count = |op: u64| words.iter().step_by(2).filter(|w| *w & 0xfff == op).count();
        let of_gpu = words
            .chunks_exact(2)
            .filter(|w| w[0] & 0xfff == MEMBAR && w[1] >> 12 & 0xf == OF_GPU)
            .count();
        let local = count(LDL) + count(STL);
        let products = [count(HGMMA) + count(QGMMA), count(HGMMA_R) + count(QGMMA_R)];
        let found = [products[0], products[1], count(USETMAXREG), local, of_gpu];
        let wanted = expected(s, defines, name);
        if found != wanted {
            let what = "products, those of registers, setmaxnreg, local memory, barriers";
            return Err(format!("{name}: {what}: {found:?}, not {wanted:?}"));
        }
        table += &format!("    {name:<20} machine code {} instructions\n", words.len() / 2);
    }
    if table.is_empty() { Err("no machine code".to_owned()) } else { Ok(table) }
}

/// How many units do not compile as they should.
fn compile_all() -> usize {
    let jobs: Vec<_> = ALL
        .iter()
        .chain([&INTEROP])
        .flat_map(|s| variants(s).into_iter().enumerate().map(move |(i, d)| (s, i, d)))
        // Variants differ in sizes only: one architecture is enough for them.
        .flat_map(|(s, i, d)| {
            // Those of `portable` differ in types: each on one, together on all, and f16, which
            // takes most registers, on sm_90a, where it came closest to spilling.
            let by_type = portable().iter().any(|(p, _)| p.name == s.name);
            let one = (i + 1) % 3;
            let archs = match (is_of_hopper(s), by_type) {
                (true, _) => 1..2,
                (_, true) => one..one + 1,
                _ => 0..if i == 0 { 3 } else { 1 },
            };
            ARCHS[archs].iter().filter(|a| runs_on(s, a)).map(move |a| (s, d.clone(), *a))
        })
        .collect();
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some((s, defines, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            match compile(s, defines, arch) {
                Ok(table) => print!("{table}"),
                Err(e) => {
                    println!("{e}");
                    failed.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    };
    let num = thread::available_parallelism().map_or(1, |n| n.get().min(8));
    thread::scope(|t| (0..num).for_each(|_| drop(t.spawn(work))));
    failed.into_inner()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted: Vec<&String> = args.iter().filter(|a| !a.starts_with('-')).collect();
    const NAME: &str = "every_unit_compiles_without_spills";
    if !wanted.is_empty() && !wanted.iter().any(|w| NAME.contains(w.as_str())) {
        println!("\nrunning 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored");
        return ExitCode::SUCCESS;
    }
    if args.iter().any(|a| a == "--list") {
        println!("{NAME}: test");
        return ExitCode::SUCCESS;
    }
    println!("\nrunning 1 test");
    let named = Path::new(WHEEL);
    if let Err(why) = load_nvrtc(named.exists().then_some(named)) {
        println!("test {NAME} ... ignored, {}", why.to_string().replace('\n', " "));
        println!("\ntest result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out");
        return ExitCode::SUCCESS;
    }
    let failed = compile_all();
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("test {NAME} ... {word}");
    println!(
        "\ntest result: {word}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out",
        u32::from(failed == 0),
        u32::from(failed > 0)
    );
    ExitCode::from(u8::from(failed > 0))
}
