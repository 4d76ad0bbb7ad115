//! Products of a warpgroup with A in registers: they are right, and mistakes with them show.

use tilewire_kernels::hopper::HOPPER_GEMM;

use crate::compile::Unit;
use crate::gemm::{Type, number};
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::{Test, tests};

pub const TESTS: &[Test] =
    tests![products_of_registers_are_exact, mistakes_with_products_of_registers_show];

const M: usize = 64;
const K: usize = 32;
const SEEDS: u64 = 6;

fn load(n: usize, t: Type, mn: bool) -> &'static Lib {
    RUNTIME.load(&Unit {
        name: "wgmma_probes.cu",
        text: HOPPER_GEMM.emu_text() + include_str!("wgmma_probes.cu"),
        defines: vec![
            ("TW_PW_N", n as u64),
            ("TW_PW_F16", u64::from(t == Type::F16)),
            ("TW_PW_MN", u64::from(mn)),
        ],
        kernels: vec!["p_wgmma"],
        smem: n.next_multiple_of(64) * 128,
    })
}

/// Runs the product of small integers, and compares each element.
fn product(lib: &'static Lib, n: usize, t: Type, wrong: u32, seed: u64) -> Result<(), String> {
    let values = |tensor, len| (0..len).map(|i| number(true, tensor, i)).collect::<Vec<f32>>();
    let (a, b) = (values(1, M * K), values(2, n * K));
    let memory = |name, v: &[f32], t: Type| {
        let bytes = t.bytes(v);
        let m = Memory::new(name, ANY, bytes.len());
        m.write(&bytes);
        m
    };
    let (am, bm) = (memory("a", &a, t), memory("b", &b, t));
    let out = memory("out", &vec![f32::NAN; M * n], Type::F32);
    let kernel = lib.kernel("p_wgmma");
    let launch = kernel.launch(128).smem((n.next_multiple_of(64) * 128) as u32);
    let launch = launch.arg(&am.addr()).arg(&bm.addr()).arg(&out.addr()).arg(&wrong);
    Run::new(seed).memory([&am, &bm, &out]).stream(0, vec![launch]).go()?;
    for (i, got) in out.read::<f32>().into_iter().enumerate() {
        let (row, col) = (i / n, i % n);
        let want: f32 = (0..K).map(|k| a[row * K + k] * b[col * K + k]).sum();
        if got != want {
            return Err(format!("{got}, not {want}, at ({row}, {col})"));
        }
    }
    Ok(())
}

fn products_of_registers_are_exact() {
    for (n, t, mn) in [
        (64, Type::Bf16, false),
        (64, Type::F16, true),
        (128, Type::Bf16, true),
        (192, Type::Bf16, true),
        (256, Type::F16, false),
    ] {
        let lib = load(n, t, mn);
        for seed in 0..SEEDS {
            product(lib, n, t, 0, seed).unwrap_or_else(|e| panic!("{n} {t:?} {mn}: {e}"));
        }
    }
}

fn mistakes_with_products_of_registers_show() {
    let (n, t) = (64, Type::Bf16);
    let lib = load(n, t, true);
    for (wrong, what) in [
        (1, "registers of a product that changed before it was waited for"),
        (2, "touched behind the last wgmma.fence"),
        (3, "ends with products that it has not waited for"),
        (4, "NaN, not"),
        (5, "touched behind the last wgmma.fence"),
        (6, "touched behind the last wgmma.fence"),
    ] {
        for seed in 0..SEEDS {
            let e = product(lib, n, t, wrong, seed).unwrap_err();
            assert!(e.contains(what), "{wrong}: {e}");
        }
    }
}
